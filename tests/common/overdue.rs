//! A selection that is overdue, because the engine left out the attention of the step in which it fell due.

use super::device::Tensors;
use super::drive::{After, Outputs, Stop, drive};
use super::memory::{Draft, Turn};
use super::rng::Rng;
use wakekv::{Cache, Entry};

/// What three decode steps read after one without attention, in a cache that selects rarely. With `dropped`, a step with other
/// queries is given up before them, when it has made the selection: those after it must not be bound to what it chose.
pub fn outputs_after_overdue<B: Tensors>(mut cache: Cache<B>, dropped: bool) -> Vec<Outputs> {
    let geometry = *cache.geometry();
    let sequence = cache.insert();
    let turn = |entry, tokens, seed| [Turn { entry, draft: Draft::random(&geometry, tokens, &mut Rng::new(seed)) }];
    drive(&mut cache, &turn(Entry::prefill(sequence, 100), 100, 4), &[], None).unwrap();
    let draft = Draft::random(&geometry, 1, &mut Rng::new(5));
    let mut step = cache.step(&[Entry::decode(sequence, 1)]).unwrap();
    for layer in 0..geometry.layers() {
        B::append_host(&mut step, layer, &draft.keys[layer], &draft.values[layer]).unwrap();
    }
    step.finish().unwrap();
    if dropped {
        let stop = Stop { layer: geometry.layers() - 1, after: After::Attend, leak: false };
        assert!(drive(&mut cache, &turn(Entry::decode(sequence, 1), 1, 90), &[], Some(stop)).unwrap().is_none());
    }
    let steps = (0..3).map(|step| turn(Entry::decode(sequence, 1), 1, 6 + step));
    steps.map(|turn| drive(&mut cache, &turn, &[], None).unwrap().unwrap().0).collect()
}
