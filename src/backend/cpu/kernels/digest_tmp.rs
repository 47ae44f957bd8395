use super::{Isa, PageShape};
use crate::selection::Digest;
#[derive(Debug, Clone, Copy)]
pub(crate) struct DigestKernels(usize);
impl DigestKernels {
    pub(crate) fn new(_: Digest, _: Isa, s: PageShape) -> Option<Self> {
        assert!(s.dtype == crate::DType::F32);
        Some(Self(s.head_dim))
    }
    pub(crate) unsafe fn build(&self, page: *const u8, d: &mut [u8]) {
        let k = unsafe { std::slice::from_raw_parts(page.cast::<f32>(), self.0 * 8) };
        let d: &mut [f32] = bytemuck::cast_slice_mut(d);
        d[..self.0].copy_from_slice(&k[..self.0]);
    }
    pub(crate) unsafe fn score(&self, q: &[f32], at: impl Fn(usize) -> *const u8, out: &mut [f32]) {
        for (i, o) in out.iter_mut().enumerate() {
            let d = unsafe { std::slice::from_raw_parts(at(i).cast::<f32>(), self.0) };
            *o = q.chunks(self.0).map(|r| r.iter().zip(d).map(|(a, b)| a * b).sum::<f32>()).fold(f32::MIN, f32::max);
        }
    }
}
