//! How the heads of a run behave: how much of what they read they keep, whether they drift, shift and wake.

use wakekv::sim::metrics::wake::{Prediction, alarms, entropy, wake_events};
use wakekv::sim::metrics::{drift, overlap, shifted};
use wakekv::table::Phase;
use wakekv::trace::{Stream, Trace};

/// Shuffles per head for the null rate of the rule for shifts.
const NULL_ROUNDS: usize = 8;

/// Steps within which an alarm has to come true.
const HORIZON: usize = 8;

/// Over the heads of one or more runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behaviour {
    pub heads: usize,
    /// Sums over heads: divide by `heads`.
    pub jaccard: f64,
    pub kappa: f64,
    pub unstable: usize,
    pub drifting: usize,
    pub shifted: usize,
    /// Expected number of heads that the rule for shifts flags by chance.
    pub null: f64,
    /// Predictions of waking from the change of the demand, from drift, from entropy.
    pub by_turnover: Prediction,
    pub by_drift: Prediction,
    pub by_entropy: Prediction,
}

impl Behaviour {
    /// Looks at every head of a trace. Waking needs attention masses: a head wakes when the pages that it has not read much so far get a
    /// fifth of its attention.
    pub fn of(trace: &Trace) -> Self {
        let mut behaviour = Behaviour::default();
        let steps: Vec<usize> =
            (0..trace.marks().len()).filter(|&step| trace.marks()[step].phase == Phase::Decode).collect();
        let context: Vec<usize> = steps.iter().map(|&step| trace.marks()[step].end()).collect();
        for (seed, head) in (0u64..).zip(trace.heads()) {
            behaviour
                .add(Demands { head, steps: &steps, context: &context, page_tokens: trace.shape().page_tokens }, seed);
        }
        behaviour
    }

    fn add(&mut self, head: Demands<'_>, seed: u64) {
        let demands: Vec<&[u32]> = head.steps.iter().map(|&step| head.head.demand(step)).collect();
        let pages = |step: usize| head.context[step].div_ceil(head.page_tokens);
        let context = |step: usize| head.context[step];
        self.heads += 1;
        self.jaccard += overlap::adjacent_jaccard(&demands);
        let kappas =
            demands.windows(2).enumerate().map(|(step, pair)| overlap::kappa(pair[0], pair[1], pages(step + 1)));
        self.kappa += kappas.sum::<f64>() / (demands.len().max(2) - 1) as f64;
        self.unstable += usize::from(drift::unstable(&demands, pages));
        self.drifting += usize::from(!drift::drift_events(&demands).is_empty());
        self.shifted += usize::from(!shifted::shifted(&demands, head.page_tokens, context).is_empty());
        self.null += shifted::null_rate(&demands, head.page_tokens, context, NULL_ROUNDS, seed);
        if let Some(masses) = head.steps.iter().map(|&step| head.head.masses(step)).collect::<Option<Vec<_>>>() {
            self.add_predictions(&demands, &masses);
        }
    }

    /// Whether a wake is announced within 8 steps by a signal that rises above two standard deviations.
    fn add_predictions(&mut self, demands: &[&[u32]], masses: &[&[f32]]) {
        let wakes = wake_events(&novelty(demands, masses));
        let base = demands.first().copied().unwrap_or(&[]);
        let turnover: Vec<f64> =
            (0..demands.len()).map(|step| overlap::churn(demands[step.max(1) - 1], demands[step])).collect();
        let drift: Vec<f64> = demands.iter().map(|demand| 1.0 - overlap::overlap_coefficient(demand, base)).collect();
        let entropies: Vec<f64> = masses.iter().map(|masses| entropy(masses)).collect();
        self.by_turnover += Prediction::judge(&alarms(&turnover), &wakes, HORIZON);
        self.by_drift += Prediction::judge(&alarms(&drift), &wakes, HORIZON);
        self.by_entropy += Prediction::judge(&alarms(&entropies), &wakes, HORIZON);
    }
}

impl std::ops::AddAssign for Behaviour {
    fn add_assign(&mut self, other: Self) {
        self.heads += other.heads;
        self.jaccard += other.jaccard;
        self.kappa += other.kappa;
        self.unstable += other.unstable;
        self.drifting += other.drifting;
        self.shifted += other.shifted;
        self.null += other.null;
        self.by_turnover += other.by_turnover;
        self.by_drift += other.by_drift;
        self.by_entropy += other.by_entropy;
    }
}

/// A head's demands in its decode steps.
struct Demands<'t> {
    head: &'t Stream,
    /// The steps of the trace that decode.
    steps: &'t [usize],
    /// Tokens after each of them.
    context: &'t [usize],
    page_tokens: usize,
}

/// Steps that a page must have gone unread to be news.
const QUIET: usize = 8;

/// Per step, the share of attention that goes to pages which none of the `QUIET` steps before has read, new text left out.
fn novelty(demands: &[&[u32]], masses: &[&[f32]]) -> Vec<f64> {
    let end = demands.first().and_then(|demand| demand.last()).copied().unwrap_or(0);
    let score = |step: usize| {
        let before = &demands[step.saturating_sub(QUIET)..step];
        let news = |page: u32| page < end && !before.iter().any(|demand| demand.binary_search(&page).is_ok());
        let pairs = || demands[step].iter().zip(masses[step]);
        let (new, all) = pairs().fold((0.0, 0.0), |(new, all), (&page, &mass)| {
            let mass = f64::from(mass);
            (new + if news(page) { mass } else { 0.0 }, all + mass)
        });
        if step < QUIET || all <= 0.0 { 0.0 } else { new / all }
    };
    (0..demands.len()).map(score).collect()
}

/// How much of its demand every head changes, one row per head, in bins of `width` decode steps.
pub fn turnover(trace: &Trace, width: usize) -> Vec<Vec<f64>> {
    let steps: Vec<usize> =
        (0..trace.marks().len()).filter(|&step| trace.marks()[step].phase == Phase::Decode).collect();
    let row = |head: &Stream| {
        let changes: Vec<f64> =
            steps.windows(2).map(|pair| overlap::churn(head.demand(pair[0]), head.demand(pair[1]))).collect();
        changes.chunks(width).map(|bin| bin.iter().sum::<f64>() / bin.len() as f64).collect()
    };
    trace.heads().iter().map(row).collect()
}
