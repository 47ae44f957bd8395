//! Every vector operation against scalar arithmetic.

use rand::prelude::*;
use rand::rngs::StdRng;

use super::*;
use crate::backend::cpu::kernels::Isa;
use crate::backend::cpu::kernels::tests::rng;

const SPECIAL: [f32; 9] = [0.0, -0.0, 1.0, -1e-40, f32::MIN, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];

#[test]
fn portable_operations_are_those_of_scalars() {
    let mut rng = rng();
    // SAFETY: plain arrays run anywhere.
    unsafe {
        operations::<Portable<8>>(&mut rng, "8 portable lanes");
        operations::<Portable<16>>(&mut rng, "16 portable lanes");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn intrinsics_are_those_of_scalars() {
    let mut rng = rng();
    if Isa::Avx2.is_available() {
        // SAFETY: the CPU has it.
        unsafe { avx2(&mut rng) };
    } else {
        println!("skipped AVX2: the CPU has none");
    }
    if Isa::Avx512.is_available() {
        // SAFETY: the CPU has it.
        unsafe { avx512(&mut rng) };
    } else {
        println!("skipped AVX-512: the CPU has none");
    }
}

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2(rng: &mut StdRng) {
    // SAFETY: the function's contract.
    unsafe { operations::<Avx2>(rng, "AVX2") }
}

/// # Safety
/// The CPU has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
unsafe fn avx512(rng: &mut StdRng) {
    // SAFETY: the function's contract.
    unsafe { operations::<Avx512>(rng, "AVX-512") }
}

/// # Safety
/// The CPU has what `V` needs.
#[inline(always)]
unsafe fn operations<V: Vector>(rng: &mut StdRng, name: &str) {
    let draw = |rng: &mut StdRng| -> f32 {
        if rng.random_bool(0.2) { *SPECIAL.choose(rng).unwrap() } else { rng.random_range(-100.0..100.0) }
    };
    for _ in 0..2000 {
        let x: [[f32; 16]; 4] = std::array::from_fn(|_| std::array::from_fn(|_| draw(rng)));
        let halves: [u16; 16] = rng.random();
        // SAFETY: the arrays hold 16 elements, a register at most; the CPU is the caller's concern.
        unsafe {
            let [a, b, c, d] = std::array::from_fn(|i| V::load(x[i].as_ptr()));
            let check = |operation: &str, got: V, want: &dyn Fn(usize) -> f32, tolerance: f32| {
                let mut lanes = [f32::NAN; 16];
                got.store(lanes.as_mut_ptr());
                for (i, &got) in lanes.iter().enumerate().take(V::LANES) {
                    let want = want(i);
                    let same = (got.is_nan() && want.is_nan())
                        || got == want
                        || (got - want).abs() <= tolerance * want.abs().max(f32::MIN_POSITIVE);
                    assert!(same, "{name} {operation}: {got:e} instead of {want:e} for {:?}", x.map(|x| x[i]));
                }
            };
            check("splat", V::splat(x[0][0]), &|_| x[0][0], 0.0);
            check("add", a.add(b), &|i| x[0][i] + x[1][i], 0.0);
            check("sub", a.sub(b), &|i| x[0][i] - x[1][i], 0.0);
            check("mul", a.mul(b), &|i| x[0][i] * x[1][i], 0.0);
            check("max", a.max(b), &|i| if x[0][i] > x[1][i] { x[0][i] } else { x[1][i] }, 0.0);
            check("min", a.min(b), &|i| if x[0][i] < x[1][i] { x[0][i] } else { x[1][i] }, 0.0);
            check("abs", a.abs(), &|i| x[0][i].abs(), 0.0);
            let half = |i: usize| f16::from_bits(halves[i]).to_f32();
            check("load f16", V::load_f16(halves.as_ptr().cast()), &half, 0.0);
            let brain = |i: usize| bf16::from_bits(halves[i]).to_f32();
            check("load bf16", V::load_bf16(halves.as_ptr().cast()), &brain, 0.0);

            // Rounded once or twice: compare where nothing cancels.
            let positive = |v: V| v.mul(v);
            let exact = |i: usize| {
                let square = x[0][i] * x[0][i];
                (f64::from(square) * f64::from(x[1][i] * x[1][i]) + f64::from(x[2][i] * x[2][i])) as f32
            };
            check("mul_add", positive(a).mul_add(positive(b), positive(c)), &exact, 2e-7);

            let exponential = |i: usize| match x[0][i] {
                x if x > 0.0 => 1.0,
                x if x < exp::LOWEST => 0.0,
                x => f64::from(x).exp() as f32,
            };
            check("exp", V::splat(0.0).min(a).exp(), &exponential, 2.4e-7);

            let mut sums = [f32::NAN; 4];
            V::sum4([a, b, c, d], sums.as_mut_ptr());
            for (got, x) in sums.into_iter().zip(x) {
                let folded: [f32; 8] = std::array::from_fn(|i| if V::LANES == 16 { x[i] + x[i + 8] } else { x[i] });
                assert!(got.to_bits() == tree(&folded).to_bits() || got.is_nan(), "{name} sum4: {got} of {x:?}");
            }
        }
    }
}
