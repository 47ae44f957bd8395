//! What is measured, and the table's lines. The scenes are those of `benches/cuda.rs`.

use cudarc::driver::sys::CUdevice_attribute;
use serde_json::{Value, json};
use wakekv::{CopyDirection, CopyPath, CopyTimer, Counts, Cuda};

use crate::report::Report;
use crate::scenes::Outcome;
use crate::scenes::copies::{MOVES, PAGE_KIB, cache_of_pages, page_counts, small_cache};
use crate::scenes::memory::{Blocks, Route, median};
use crate::scenes::scene::{Residency, Scene, Size};

/// How much is measured.
pub struct Plan {
    /// Bytes of a large copy.
    block: usize,
    attention: Size,
    steps: Size,
    /// Most pages of a copy.
    most_pages: usize,
    /// Pages that the number of blocks is tried with.
    pages_for_blocks: usize,
    samples: usize,
    /// Steps before the first sample.
    warm_up: usize,
}

impl Plan {
    pub fn full(layers: usize) -> Self {
        Plan {
            block: 1 << 30,
            attention: Size::llama(2, 32),
            steps: Size::llama(layers, 16),
            most_pages: 4096,
            pages_for_blocks: 1024,
            samples: 20,
            warm_up: 3,
        }
    }

    /// Enough to see that everything runs. The times mean nothing.
    pub fn tiny() -> Self {
        Plan {
            block: 1 << 20,
            attention: Size::tiny(),
            steps: Size::tiny(),
            most_pages: 4,
            pages_for_blocks: 4,
            samples: 2,
            warm_up: 1,
        }
    }
}

/// Device, driver and memory.
pub fn describe(cuda: &Cuda, report: &mut Report) -> Outcome<()> {
    let cache = cache_of_pages(cuda.clone(), 8)?;
    let context = cache.stream().context();
    let attribute = |attribute| context.attribute(attribute);
    let (major, minor) = context.compute_capability()?;
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let copy_engines = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?;
    let (name, memory) = (context.name()?, context.total_mem()?);
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let driver = driver.lines().next().unwrap_or("unknown").trim();
    report.line(&format!("{name}, compute capability {major}.{minor}, {multiprocessors} multiprocessors, {copy_engines} copy engines, {:.1} GiB", memory as f64 / (1u64 << 30) as f64));
    report.line(&format!("driver: {driver}"));
    report.value(
        "device",
        json!({
            "name": name, "capability": format!("{major}.{minor}"), "multiprocessors": multiprocessors,
            "copy_engines": copy_engines, "bytes": memory, "driver": driver, "wakekv": env!("CARGO_PKG_VERSION"),
        }),
    );
    Ok(())
}

pub fn run(cuda: &Cuda, plan: &Plan, report: &mut Report) -> Outcome<()> {
    let [within_device, host_to_device, _] = large_copies(cuda, plan, report)?;
    attention(cuda, plan, within_device, report)?;
    pages(cuda, plan, host_to_device, report)?;
    blocks(cuda, plan, report)?;
    steps(cuda, plan, report)
}

/// Bytes per second of copies of one large block, by route.
fn large_copies(cuda: &Cuda, plan: &Plan, report: &mut Report) -> Outcome<[f64; 3]> {
    report.heading("Copies of one large block, GB/s");
    let cache = cache_of_pages(cuda.clone(), 8)?;
    let mut blocks = Blocks::new(cache.stream(), plan.block)?;
    let mut speeds = [0.0; 3];
    for (route, speed) in Route::ALL.into_iter().zip(&mut speeds) {
        blocks.time(route)?;
        let times = (0..5).map(|_| blocks.time(route)).collect::<Outcome<_>>()?;
        *speed = (route.traffic() * blocks.bytes()) as f64 / median(times);
    }
    let [within, to, from] = speeds.map(|speed| speed / 1e9);
    report.line(&format!(
        "  within the device, read and written {within:.0}   host to device {to:.1}   device to host {from:.1}"
    ));
    report.value("large_copies_gb_s", json!({"within_device": within, "host_to_device": to, "device_to_host": from}));
    Ok(speeds)
}

fn attention(cuda: &Cuda, plan: &Plan, within_device: f64, report: &mut Report) -> Outcome<()> {
    let Size { geometry, sequences, .. } = plan.attention;
    report
        .heading(&format!("Attention, {sequences} sequences, all resident, the whole call with the demand before it"));
    let mut scene = Scene::new(cuda.clone(), plan.attention, Residency::ReadAll)?;
    (0..plan.warm_up).try_for_each(|_| scene.attention().map(drop))?;
    let times = (0..plan.samples).map(|_| scene.attention()).collect::<Outcome<_>>()?;
    let (seconds, tokens) = (median(times), scene.tokens()?);
    let speed = plan.attention.layer_bytes(tokens) as f64 / seconds;
    report.line(&format!(
        "  {tokens} tokens × {} KV heads × {} channels: {:.1} µs, {:.0} GB/s",
        geometry.kv_heads(),
        geometry.head_dim(),
        1e6 * seconds,
        speed / 1e9
    ));
    report.value(
        "attention",
        json!({"tokens": tokens, "sequences": sequences, "us": 1e6 * seconds, "gb_s": speed / 1e9}),
    );
    report.target("of the copy within the device", speed / within_device, true, 0.85);
    Ok(())
}

/// Copies of scattered pages, by size and number.
fn pages(cuda: &Cuda, plan: &Plan, host_to_device: f64, report: &mut Report) -> Outcome<()> {
    report.heading("Scattered pages, GB/s: gather / DMA to the device, mirror / DMA to the host");
    let mut figures = Vec::new();
    let mut slowest = f64::INFINITY;
    for kib in PAGE_KIB {
        let mut cache = cache_of_pages(cuda.clone(), kib)?;
        let mut timer = cache.copy_timer(plan.most_pages)?;
        for count in page_counts(plan.most_pages) {
            let mut speeds = [0.0; 4];
            for ((_, direction, path), speed) in MOVES.into_iter().zip(&mut speeds) {
                timer.time(direction, path, count)?;
                let times =
                    (0..5).map(|_| Ok(timer.time(direction, path, count)?.as_secs_f64())).collect::<Outcome<_>>()?;
                *speed = ((count * kib) << 10) as f64 / median(times);
            }
            let [gather, dma, mirror, mirror_dma] = speeds.map(|speed| speed / 1e9);
            let line =
                format!("  {kib:>2} KiB × {count:<5} {gather:>6.2} / {dma:<6.2} {mirror:>6.2} / {mirror_dma:<6.2}");
            report.line(&line);
            figures.push(json!({
                "page_kib": kib, "pages": count,
                "gather_gb_s": gather, "dma_gb_s": dma, "mirror_gb_s": mirror, "mirror_dma_gb_s": mirror_dma,
            }));
            if kib == 8 && count >= plan.most_pages.min(256) {
                slowest = slowest.min(speeds[0]);
            }
        }
    }
    report.value("pages", json!(figures));
    report.target("gather of 256 and more 8 KiB pages, of the copy", slowest / host_to_device, true, 0.85);
    Ok(())
}

/// What the number of blocks does to the gather kernel.
fn blocks(cuda: &Cuda, plan: &Plan, report: &mut Report) -> Outcome<()> {
    report.heading(&format!("Gather of {} 8 KiB pages by copy_blocks, GB/s", plan.pages_for_blocks));
    let (mut line, mut figures) = (String::new(), Vec::new());
    for blocks in [4, 8, 16, 24, 32, 48, 64] {
        let mut cache = cache_of_pages(cuda.clone().copy_blocks(blocks), 8)?;
        let mut timer = cache.copy_timer(plan.pages_for_blocks)?;
        let speed = (plan.pages_for_blocks << 13) as f64 / gather(&mut timer, plan.pages_for_blocks)? / 1e9;
        line += &format!("  {blocks}: {speed:.1}");
        figures.push(json!({"blocks": blocks, "gb_s": speed}));
    }
    report.line(&line);
    report.value("gather_by_blocks", json!(figures));
    Ok(())
}

/// A step by its misses.
struct Row {
    /// Of the pages that are read, those that are replaced in each step. `None` where everything is resident.
    share: Option<f64>,
    missed: f64,
    /// Seconds that the gather kernel takes for as many pages, without a step.
    copies: f64,
    called: [f64; 2],
    replayed: [f64; 2],
}

fn steps(cuda: &Cuda, plan: &Plan, report: &mut Report) -> Outcome<()> {
    let Size { geometry, sequences, .. } = plan.steps;
    let read = plan.steps.pages_read();
    report.heading(&format!(
        "Steps of {sequences} sequences, {} layers, {read} of {} pages read: µs of the step (of the host in it)",
        geometry.layers(),
        plan.steps.prompt_pages
    ));
    report
        .line(&format!("  {:<22} {:>8} {:>14}   {:>18}   {:>18}", "", "missed", "gather alone", "called", "replayed"));
    // A layer's pages, as they are gathered at once.
    let layer_pages = sequences * geometry.kv_heads() * (read + 1);
    let mut timed = small_cache(cuda.clone(), geometry)?;
    let mut timer = timed.copy_timer(layer_pages)?;
    let mut rows = Vec::new();
    for residency in [Residency::KeepAll, Residency::KeepRead] {
        let mut scene = Scene::new(cuda.clone(), plan.steps, residency)?;
        let shares: &[f64] = if residency == Residency::KeepAll { &[0.05] } else { &[0.0, 0.01, 0.05, 0.2, 1.0] };
        let called = shares.iter().map(|&share| sample(&mut scene, plan, share)).collect::<Outcome<Vec<_>>>()?;
        scene.capture()?;
        for (&share, (called, _)) in shares.iter().zip(called) {
            let (replayed, counts) = sample(&mut scene, plan, share)?;
            let missed = counts.miss_rate();
            let pages = (missed * layer_pages as f64).round() as usize;
            let copies = geometry.layers() as f64 * gather(&mut timer, pages)?;
            let share = (residency == Residency::KeepRead).then_some(share);
            let row = Row { share, missed, copies, called, replayed };
            report.line(&row.line());
            rows.push(row);
        }
    }
    report.value("steps", rows.iter().map(Row::json).collect());
    let replayed = |share| rows.iter().find(|row| row.share == Some(share)).map_or(f64::NAN, |row| row.replayed[0]);
    report.target("replayed step with 5 % misses, of one with none", replayed(0.05) / replayed(0.0), false, 1.15);
    for row in rows.iter().filter(|row| row.copies > 0.0) {
        let none = replayed(0.0);
        let hidden = (none + row.copies - row.replayed[0]) / none.min(row.copies);
        report.line(&format!(
            "  {:.1} % missed: {:.0} % of the shorter of step without misses and gather alone is hidden",
            100.0 * row.missed,
            100.0 * hidden
        ));
    }
    Ok(())
}

impl Row {
    fn line(&self) -> String {
        let cell = |[step, host]: [f64; 2]| format!("{:.1} ({:.1})", 1e6 * step, 1e6 * host);
        let name = self.share.map_or("all resident".into(), |share| format!("{:.0} % replaced", 100.0 * share));
        let (missed, copies) = (100.0 * self.missed, 1e6 * self.copies);
        let (called, replayed) = (cell(self.called), cell(self.replayed));
        format!("  {name:<22} {missed:>6.2} % {copies:>14.1}   {called:>18}   {replayed:>18}")
    }

    fn json(&self) -> Value {
        json!({
            "share": self.share, "missed": self.missed, "gather_us": 1e6 * self.copies,
            "called_us": 1e6 * self.called[0], "called_host_us": 1e6 * self.called[1],
            "replayed_us": 1e6 * self.replayed[0], "replayed_host_us": 1e6 * self.replayed[1],
        })
    }
}

/// Seconds that the gather kernel takes for so many pages, alone.
fn gather(timer: &mut CopyTimer<'_>, pages: usize) -> Outcome<f64> {
    if pages == 0 {
        return Ok(0.0);
    }
    let mut time = || Ok(timer.time(CopyDirection::Fetch, CopyPath::Kernel, pages)?.as_secs_f64());
    time()?;
    Ok(median((0..5).map(|_| time()).collect::<Outcome<_>>()?))
}

/// Medians of a step's time and of the host's part in it, and what was counted meanwhile.
fn sample(scene: &mut Scene, plan: &Plan, share: f64) -> Outcome<([f64; 2], Counts)> {
    (0..plan.warm_up).try_for_each(|_| scene.step(share).map(drop))?;
    let before = scene.counts()?;
    let taken = (0..plan.samples).map(|_| scene.step(share)).collect::<Outcome<Vec<_>>>()?;
    let mut counts = scene.counts()?;
    counts.demanded -= before.demanded;
    counts.compulsory -= before.compulsory;
    counts.capacity -= before.capacity;
    let step = median(taken.iter().map(|taken| taken.step.as_secs_f64()).collect());
    let host = median(taken.iter().map(|taken| taken.host.as_secs_f64()).collect());
    Ok(([step, host], counts))
}
