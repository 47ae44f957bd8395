//! Pages between reservoir and device, by kernel and by DMA.

use wakekv::{Cache, CopyDirection, CopyPath, Cuda, CudaBackend, DType, Geometry, Reservoir};

use super::Outcome;

/// The four ways in which pages move.
pub const MOVES: [(&str, CopyDirection, CopyPath); 4] = [
    ("gather", CopyDirection::Fetch, CopyPath::Kernel),
    ("dma", CopyDirection::Fetch, CopyPath::Dma),
    ("mirror", CopyDirection::Mirror, CopyPath::Kernel),
    ("mirror_dma", CopyDirection::Mirror, CopyPath::Dma),
];

/// KiB of the pages that are measured.
pub const PAGE_KIB: [usize; 5] = [4, 8, 16, 32, 64];

/// 1, 2, 4 ... `most`.
pub fn page_counts(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |count| Some(2 * count)).take_while(move |&count| count <= most)
}

/// A cache whose pages have so many KiB, for its [`copy_timer`](Cache::copy_timer).
pub fn cache_of_pages(cuda: Cuda, kib: usize) -> Outcome<Cache<CudaBackend>> {
    // A token of 128 channels takes half a KiB, and a page has at most 64 of them.
    let head_dim = if kib > 32 { 256 } else { 128 };
    let page_tokens = (kib << 10) / (4 * head_dim);
    let geometry = Geometry::builder().head_dim(head_dim).page_tokens(page_tokens).dtype(DType::F16).build()?;
    small_cache(cuda, geometry)
}

/// A cache with few pages.
pub fn small_cache(cuda: Cuda, geometry: Geometry) -> Outcome<Cache<CudaBackend>> {
    let bytes = 4 * geometry.group_bytes() as u64;
    Ok(Cache::builder(geometry).pages_per_head(4).device_pool(bytes).reservoir(Reservoir::memory(bytes)).build(cuda)?)
}
