//! Copies that fail, a worker that dies, and what the reservoir's bytes are worth.

mod common;

use common::Rng;
use common::drive::{Outputs, drive};
use common::faulty::{Fault, Handle};
use common::memory::{Draft, Turn};
use wakekv::{Cache, Cpu, DType, Entry, Error, Geometry, Reservoir, Sequence};

fn geometry() -> Geometry {
    let shape = Geometry::builder().layers(2).query_heads(4).kv_heads(2).head_dim(32);
    shape.page_tokens(8).dtype(DType::F16).build().unwrap()
}

const PAGES: usize = 64;

/// Small enough that prefill overflows and decode fetches.
fn cache(reservoir: Reservoir, threads: usize) -> Cache {
    Cache::builder(geometry()).pages_per_head(3).reservoir(reservoir).build(Cpu::new().threads(threads)).unwrap()
}

fn faulty(threads: usize) -> (Cache, Handle) {
    let (store, reservoir) = Handle::new(PAGES * geometry().group_bytes());
    (cache(reservoir, threads), store)
}

/// Two sequences, and what their steps bring: a prompt, a second chunk together with a decode, and tokens of decode.
fn steps() -> Vec<[(bool, Draft); 2]> {
    let mut rng = Rng::new(7);
    let lengths = [(false, 50, 20), (false, 30, 1), (true, 1, 1), (true, 9, 2), (true, 1, 1)];
    let mut draft = |tokens| Draft::random(&geometry(), tokens, &mut rng);
    lengths.map(|(decode, a, b)| [(decode, draft(a)), (b < 20, draft(b))]).into()
}

fn run(cache: &mut Cache, sequences: [Sequence; 2], step: &[(bool, Draft); 2]) -> Result<Outputs, Error> {
    let turn = |sequence, (decode, draft): &(bool, Draft)| {
        let entry = if *decode { Entry::decode } else { Entry::prefill };
        Turn { entry: entry(sequence, draft.tokens), draft: draft.clone() }
    };
    let turns = [turn(sequences[0], &step[0]), turn(sequences[1], &step[1])];
    Ok(drive(cache, &turns, &[], None)?.expect("nobody stops it").0)
}

fn expected() -> Vec<Outputs> {
    let bytes = (PAGES * geometry().group_bytes()) as u64;
    let mut cache =
        Cache::builder(geometry()).reservoir(Reservoir::memory(bytes)).build(Cpu::new().threads(1)).unwrap();
    let sequences = [cache.insert(), cache.insert()];
    steps().iter().map(|step| run(&mut cache, sequences, step).unwrap()).collect()
}

#[test]
fn whichever_copy_fails_the_step_fails_and_the_next_try_is_right() {
    let expected = expected();
    for threads in [1, 3] {
        let (mut cache, store) = faulty(threads);
        let sequences = [cache.insert(), cache.insert()];
        let (mut fetches, mut mirrors) = (0, 0);
        for (step, expected) in steps().iter().zip(&expected) {
            let tokens = sequences.map(|sequence| cache.tokens(sequence).unwrap());
            let occupancy = cache.occupancy();
            for copy in 0.. {
                store.arm(Fault::Fail(copy));
                let result = run(&mut cache, sequences, step);
                let copies = store.disarm();
                cache.check().unwrap();
                assert!(store.lock().broken.is_empty());
                match result {
                    Ok(outputs) => {
                        assert!(copies <= copy, "copy {copy} of {copies} has failed, and the step has not");
                        assert!(outputs == *expected, "{threads} threads, after {copy} failures");
                        break;
                    }
                    Err(Error::Copy { direction, bytes, offset, cause }) => {
                        *if direction == "fetch" { &mut fetches } else { &mut mirrors } += 1;
                        assert_eq!((bytes, cause.to_string().as_str()), (geometry().page_bytes(), "injected"));
                        assert!(offset < (PAGES * geometry().group_bytes()) as u64);
                    }
                    Err(other) => panic!("{other}"),
                }
                assert_eq!(sequences.map(|sequence| cache.tokens(sequence).unwrap()), tokens);
                assert_eq!(cache.occupancy(), occupancy);
            }
        }
        assert!(fetches > 20 && mirrors > 20, "{fetches} fetches and {mirrors} mirrors have failed");
    }
}

#[test]
fn a_dead_worker_is_a_typed_error_and_never_a_hang() {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for (threads, at) in [(1, 0), (3, 0), (1, 5), (3, 5), (3, 40)] {
            kill_the_worker(threads, at);
        }
        done.send(()).unwrap();
    });
    finished.recv_timeout(std::time::Duration::from_secs(60)).expect("neither a hang nor a panic");
}

fn kill_the_worker(threads: usize, at: usize) {
    let (store, reservoir) = Handle::new(PAGES * geometry().group_bytes());
    let builder = Cache::builder(geometry()).pages_per_head(3).reservoir(reservoir).scrub_on_free(true);
    // The least depth: submitters wait for room.
    let mut cache = builder.build(Cpu::new().threads(threads).queue_depth(128)).unwrap();
    let sequences = [cache.insert(), cache.insert()];
    let steps = steps();
    run(&mut cache, sequences, &steps[0]).unwrap();
    store.arm(Fault::Panic(at));
    let tokens = |cache: &Cache| sequences.map(|sequence| cache.tokens(sequence).unwrap());
    // The first step meets the death, the second one begins after it.
    for _ in 0..2 {
        let error = run(&mut cache, sequences, &steps[1]).unwrap_err();
        assert!(matches!(error, Error::CopyWorkerDead), "{error}");
        assert!(error.to_string().contains("store panicked): build a new cache"));
        assert_eq!(tokens(&cache), [50, 20]);
        cache.check().unwrap();
    }
    // Far more mirrors than the queue is deep.
    let new = cache.insert();
    let long = Turn { entry: Entry::prefill(new, 300), draft: Draft::random(&geometry(), 300, &mut Rng::new(3)) };
    assert!(matches!(drive(&mut cache, &[long], &[], None), Err(Error::CopyWorkerDead)));
    // Scrubbing needs the worker. The sequence is gone all the same.
    assert!(matches!(cache.remove(sequences[0]), Err(Error::CopyWorkerDead)));
    assert!(matches!(cache.remove(sequences[0]), Err(Error::UnknownSequence { .. })));
    cache.check().unwrap();
}

#[test]
fn scrubbing_overwrites_the_store_and_nothing_else_does() {
    for scrub in [true, false] {
        let (store, reservoir) = Handle::new(PAGES * geometry().group_bytes());
        let builder = Cache::builder(geometry()).pages_per_head(3).reservoir(reservoir).scrub_on_free(scrub);
        let mut cache = builder.build(Cpu::new().threads(2)).unwrap();
        let sequences = [cache.insert(), cache.insert()];
        let steps = steps();
        let used = |store: &Handle| {
            store.lock().bytes.chunks(geometry().group_bytes()).filter(|group| group.iter().any(|&b| b != 0)).count()
        };
        run(&mut cache, sequences, &steps[0]).unwrap();
        assert_eq!(used(&store), 6 + 2);
        // A step that fails leaves no pages behind, and takes none from the others.
        store.arm(Fault::Fail(10));
        run(&mut cache, sequences, &steps[1]).unwrap_err();
        store.disarm();
        assert!(used(&store) == 8 || !scrub);
        cache.remove(sequences[0]).unwrap();
        assert!(used(&store) == 2 || !scrub);
        cache.remove(sequences[1]).unwrap();
        assert_eq!(used(&store) == 0, scrub);
    }
}

#[test]
fn a_file_holds_a_context_that_is_larger_than_the_device_pool() {
    let path = std::env::temp_dir().join(format!("wakekv-copies-{}", std::process::id()));
    let bytes = (PAGES * geometry().group_bytes()) as u64;
    let build = |bytes| {
        let builder = Cache::builder(geometry()).pages_per_head(3).device_pool(6 * geometry().group_bytes() as u64);
        builder.reservoir(Reservoir::file(&path, bytes)).build(Cpu::new().threads(2))
    };
    let mut cache = build(bytes).unwrap();
    assert!(!path.exists() || cfg!(not(unix)), "a killed process would leave the file behind");
    let sequences = [cache.insert(), cache.insert()];
    for (step, expected) in steps().iter().zip(expected()) {
        assert!(run(&mut cache, sequences, step).unwrap() == expected);
        cache.check().unwrap();
    }
    assert!(cache.occupancy().reservoir_owned > cache.occupancy().device_total / geometry().heads());
    drop(cache);
    assert!(!path.exists());
    std::fs::write(&path, "somebody else's").unwrap();
    let text = build(bytes).map(drop).unwrap_err().to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains(&format!("{bytes} bytes")), "{text}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody else's");
    std::fs::remove_file(&path).unwrap();
}
