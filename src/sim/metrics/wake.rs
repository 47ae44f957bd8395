//! Whether a head's waking can be predicted (after WakeKV, arXiv 2610.02713).

/// A head wakes at a step whose score is above 0.2 after at least 8 steps below 0.05. The score is a share of attention mass: that on a
/// needle, say, or on pages that were quiet.
pub fn wake_events(scores: &[f64]) -> Vec<usize> {
    let (mut asleep, mut events) = (0, Vec::new());
    for (step, &score) in scores.iter().enumerate() {
        if score > 0.2 && asleep >= 8 {
            events.push(step);
        }
        // Between the thresholds it neither sleeps nor wakes: it may be on its way up.
        if score < 0.05 {
            asleep += 1;
        } else if score > 0.2 {
            asleep = 0;
        }
    }
    events
}

/// The steps at which a signal is more than 2 standard deviations above the mean of the 32 steps before it. Only what was seen before
/// a step is used for it; where the signal did not vary at all, any rise is an alarm. The first 32 steps have none.
pub fn alarms(signal: &[f64]) -> Vec<usize> {
    const MEMORY: usize = 32;
    let mut alarms = Vec::new();
    for (step, (window, &value)) in signal.windows(MEMORY).zip(signal.iter().skip(MEMORY)).enumerate() {
        let mean = window.iter().sum::<f64>() / MEMORY as f64;
        let variance = window.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / MEMORY as f64;
        if value - mean > 2.0 * variance.sqrt() + 1e-12 {
            alarms.push(step + MEMORY);
        }
    }
    alarms
}

/// How good a predictor is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    /// Alarms that a wake followed within the horizon.
    pub right: usize,
    /// Alarms.
    pub alarms: usize,
    /// Wakes that an alarm announced within the horizon.
    pub announced: usize,
    /// Wakes.
    pub wakes: usize,
}

impl Prediction {
    /// Judges alarms against wakes, both ascending: an alarm at s announces a wake at w when s < w ≤ s + `horizon`.
    pub fn judge(alarms: &[usize], wakes: &[usize], horizon: usize) -> Self {
        let announces = |alarm: usize, wake: usize| alarm < wake && wake - alarm <= horizon;
        Prediction {
            right: alarms.iter().filter(|&&alarm| wakes.iter().any(|&wake| announces(alarm, wake))).count(),
            alarms: alarms.len(),
            announced: wakes.iter().filter(|&&wake| alarms.iter().any(|&alarm| announces(alarm, wake))).count(),
            wakes: wakes.len(),
        }
    }

    /// Share of the alarms that were right; `None` without alarms.
    pub fn precision(&self) -> Option<f64> {
        (self.alarms > 0).then(|| self.right as f64 / self.alarms as f64)
    }

    /// Share of the wakes that were announced; `None` without wakes.
    pub fn recall(&self) -> Option<f64> {
        (self.wakes > 0).then(|| self.announced as f64 / self.wakes as f64)
    }
}

impl std::ops::AddAssign for Prediction {
    fn add_assign(&mut self, other: Self) {
        self.right += other.right;
        self.alarms += other.alarms;
        self.announced += other.announced;
        self.wakes += other.wakes;
    }
}

/// Entropy in nats of attention mass over pages, normalised to sum to 1: a candidate for a signal. 0 when there is no mass.
pub fn entropy(masses: &[f32]) -> f64 {
    let sum: f64 = masses.iter().map(|&mass| f64::from(mass)).sum();
    if sum <= 0.0 {
        return 0.0;
    }
    let shares = masses.iter().map(|&mass| f64::from(mass) / sum).filter(|&share| share > 0.0);
    -shares.map(|share| share * share.ln()).sum::<f64>()
}
