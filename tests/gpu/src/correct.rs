//! What must be right on the device: every kernel through the cache, against float64, the rule's naive table and a cache on the CPU.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use wakekv::{Cache, Cuda, CudaBackend, DType, Digest, Error, FetchPath, Geometry, Reservoir, Selection};

use crate::case::{Case, Place, Wanted};
use crate::common::faulty::Handle;
use crate::common::{Part, Rng, World, error_against_dense, run_step};
use crate::harness::Harness;
use crate::replays::Scene;

/// Exponentials and the order of sums differ from the CPU's in the last bits of f32.
const TOLERANCE: f64 = 1e-4;
const HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// The device, and how much of it is to be checked.
#[derive(Clone)]
pub struct Device {
    pub cuda: Cuda,
    /// A device that is emulated takes a thread and seconds for what takes a device milliseconds.
    pub emulated: bool,
    pub seed: u64,
}

/// What a check has come to.
pub struct Verdict {
    pub name: &'static str,
    /// The kernels that it goes through.
    pub kernels: &'static str,
    /// How many cases, or what has failed first.
    pub result: Result<usize, String>,
    pub took: Duration,
}

type Check = (&'static str, &'static str, fn(&Device) -> Result<usize, String>);

const CHECKS: [Check; 6] = [
    ("every head dim, group, page size and dtype", "append attend attend_chunk merge gather mirror", shapes),
    ("histories that read all", "open append demand gather mirror attend merge undo", |d| histories(d, Wanted::All)),
    ("histories that name pages", "select demand arrive grant move", |d| histories(d, Wanted::Explicit)),
    ("histories that choose pages", "score select", |d| histories(d, Wanted::TopPages)),
    ("large pages in many waves", "gather attend", |d| histories(d, Wanted::LargePages)),
    ("captured steps, replayed", "all, in a graph", replays),
];

/// Runs all checks and tells of each as it ends.
pub fn run(device: &Device, mut tell: impl FnMut(&Verdict)) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (name, kernels, check) in CHECKS {
        let start = Instant::now();
        let verdict = Verdict { name, kernels, result: check(device), took: start.elapsed() };
        tell(&verdict);
        verdicts.push(verdict);
    }
    verdicts
}

impl Place for Device {
    type Backend = CudaBackend;
    const TOLERANCE: f64 = TOLERANCE;
    const TWIN_TOLERANCE: f32 = TOLERANCE as f32;
    const FORGETS_UNDONE: bool = true;

    fn build(&self, case: &Case) -> (Cache<CudaBackend>, Option<Handle>) {
        let rng = &mut Rng::new(case.seed ^ 0xC0DA);
        let path = rng.pick(&[FetchPath::Auto, FetchPath::Gather, FetchPath::Dma]);
        let cuda = self.cuda.clone().fetch_path(path).pin_in_background(rng.chance(30));
        let cuda = match case.staging {
            // A ring of one to three pages for each lane of the largest batch.
            Some(extra) => cuda.staging_pages(5 * case.geometry.kv_heads() * (1 + extra % 3)),
            None => cuda,
        };
        (case.builder().reservoir(Reservoir::memory(case.bytes() as u64)).build(cuda).unwrap(), None)
    }
}

fn histories(device: &Device, wanted: Wanted) -> Result<usize, String> {
    let (count, limit) = match (device.emulated, wanted) {
        (true, _) => (1, Duration::MAX),
        (false, Wanted::LargePages) => (40, Duration::from_secs(20)),
        (false, _) => (400, Duration::from_secs(30)),
    };
    side_by_side(device, count, limit, |index| {
        let mut case = Case::random(wanted, device.seed + index as u64).on_cuda(&HEAD_DIMS);
        if device.emulated {
            case.operations /= 6;
        }
        Harness::new(&case, device).run();
    })
}

fn shapes(device: &Device) -> Result<usize, String> {
    let mut shapes = Vec::new();
    for head_dim in HEAD_DIMS {
        for group in [1, 2, 3, 4, 7, 8, 16] {
            for page_tokens in [8, 16, 32, 64] {
                for dtype in [DType::F16, DType::BF16] {
                    let builder = Geometry::builder().kv_heads(2).query_heads(2 * group).head_dim(head_dim);
                    shapes.push(builder.page_tokens(page_tokens).dtype(dtype).build().unwrap());
                }
            }
        }
    }
    if device.emulated {
        // A stride that is prime to each of the counts above but 5 · 7: some of every kind.
        shapes = shapes.into_iter().step_by(53).collect();
    }
    side_by_side(device, shapes.len(), Duration::from_secs(60), |index| {
        let world = World { geometry: shapes[index], seed: index as u64 };
        let page_tokens = world.geometry.page_tokens();
        let builder = Cache::builder(world.geometry).pages_per_head(2).reservoir(Reservoir::memory(8 << 20));
        let mut cache = builder.build(device.cuda.clone()).unwrap();
        let sequence = cache.insert();
        let mut start = 0;
        for tokens in [2 * page_tokens + 3, 5, 1, 1] {
            let part = Part::new(&world, sequence, start, tokens);
            let (outputs, _) = run_step(&mut cache, &[part]).unwrap();
            if tokens < 9 {
                let error = error_against_dense(&part, 0, &outputs[0], &|_| true);
                assert!(error < TOLERANCE, "{:?}, {tokens} tokens at {start}: off by {error}", world.geometry);
            }
            start += tokens;
        }
        cache.check().unwrap();
    })
}

/// Replayed until they are outgrown, captured anew, and mixed with calls and steps that are given up.
fn replays(device: &Device) -> Result<usize, String> {
    let selections =
        [Selection::All, Selection::top_pages(3), Selection::top_pages(4).scored_by(Digest::MinMax).pinned(2, 0)];
    let head_dims = if device.emulated { &HEAD_DIMS[..1] } else { &HEAD_DIMS[..] };
    let tokens = if device.emulated { 20 } else { 200 };
    side_by_side(device, head_dims.len() * selections.len(), Duration::from_secs(40), |index| {
        let (head_dim, selection) = (head_dims[index / selections.len()], selections[index % selections.len()]);
        let geometry = Geometry::builder().layers(2).query_heads(8).kv_heads(2).head_dim(head_dim).page_tokens(8);
        let geometry = geometry.dtype(if index % 2 == 0 { DType::F16 } else { DType::BF16 }).build().unwrap();
        let stickiness = [0.0, 0.5][index % 2];
        let builder = || {
            let builder = Cache::builder(geometry).selection(selection).stickiness(stickiness);
            builder.reservoir(Reservoir::memory(4 << 20))
        };
        let mut scene = Scene::new(device.cuda.clone(), builder, 6, 50, TOLERANCE as f32);
        let rng = &mut Rng::new(device.seed + index as u64);
        let mut captured = scene.capture();
        while scene.position < 50 + tokens {
            match rng.below(8) {
                0 => scene.call().unwrap(),
                1 => match scene.give_up(&captured) {
                    Ok(()) | Err(Error::Capture { .. }) => {}
                    Err(error) => panic!("{error}"),
                },
                _ => match scene.replay(&captured) {
                    Ok(()) => {}
                    Err(Error::Capture { .. }) => captured = scene.capture(),
                    Err(error) => panic!("{error}"),
                },
            }
        }
        scene.cache.check().unwrap();
    })
}

/// Runs cases 0 to `count` on as many threads as there are, until one fails or the time is up. How many were run, or what
/// failed first.
fn side_by_side(device: &Device, count: usize, limit: Duration, case: impl Fn(usize) + Sync) -> Result<usize, String> {
    let (threads, limit) = match device.emulated {
        true => (1, Duration::MAX),
        false => (thread::available_parallelism().map_or(1, usize::from).min(16), limit),
    };
    let (start, next, run) = (Instant::now(), AtomicUsize::new(0), AtomicUsize::new(0));
    let failed: Mutex<Option<String>> = Mutex::default();
    let work = || {
        while start.elapsed() < limit && failed.lock().unwrap().is_none() {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| case(index))) {
                Ok(()) => _ = run.fetch_add(1, Ordering::Relaxed),
                Err(panic) => {
                    let words = format!("case {index} from seed {}: {}", device.seed, words(&*panic));
                    failed.lock().unwrap().get_or_insert(words);
                }
            }
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    match failed.into_inner().unwrap() {
        Some(failure) => Err(failure),
        None => Ok(run.into_inner()),
    }
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked")
}
