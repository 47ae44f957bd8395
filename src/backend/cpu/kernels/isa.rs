//! Which instructions the kernels use.

/// An instruction set that the CPU kernels are built for.
///
/// All of them compute the same thing; they differ in speed and in the last bits of attention. Page digests choose the
/// same pages on every one of them, to the bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// No assumptions beyond the target's baseline. Runs everywhere.
    Portable,
    /// x86-64 with AVX2, FMA and F16C: Intel Haswell, AMD Zen and everything later.
    Avx2,
    /// x86-64 with AVX-512F. Heads whose channels do not fill 16 lanes run the AVX2 kernels.
    Avx512,
}

impl Isa {
    const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::available().last().unwrap_or(Isa::Portable)
    }

    /// What this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Isa::Avx2.is_available() && is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        })
    }
}
