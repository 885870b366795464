//! What the benchmarks share: variants of a computation, timed in turn in one process.
//!
//! All variants run interleaved, a few steps of each in turn, so that the ratios do not depend on
//! what else the machine does. A sample is the time of several steps with one synchronization at
//! their end. Times are medians, ratios are medians of the ratios of samples of the same round.

// Each benchmark uses a part of this.
#![allow(dead_code, unused_imports)]

mod conv_net;
mod turns;

use std::error::Error;
use std::time::Instant;

use burn::tensor::Device;
use indicatif::ProgressBar;

pub(crate) use conv_net::ConvNet;
pub(crate) use turns::Turns;

/// A way to compute something, with the samples taken of it.
pub(crate) struct Variant {
    step: Box<dyn FnMut() -> Result<(), Box<dyn Error>>>,
    /// Time of one step, one number for each sample [ms].
    milliseconds: Vec<f64>,
}

impl Variant {
    pub(crate) fn new(step: impl FnMut() -> Result<(), Box<dyn Error>> + 'static) -> Self {
        Self {
            step: Box::new(step),
            milliseconds: Vec::new(),
        }
    }

    /// Time of a step [ms].
    pub(crate) fn median(&self) -> Option<f64> {
        median(self.milliseconds.clone())
    }

    /// Median over the samples of this and another variant, each compared with that of the same
    /// round.
    pub(crate) fn compared(&self, other: &Self, of: impl Fn(f64, f64) -> f64) -> Option<f64> {
        let pairs = self.milliseconds.iter().zip(&other.milliseconds);
        median(pairs.map(|(a, b)| of(*a, *b)).collect())
    }
}

/// A step of each variant: kernels are compiled then.
pub(crate) fn warm_up(variants: &mut [Variant], device: &Device) -> Result<(), Box<dyn Error>> {
    for variant in variants {
        (variant.step)()?;
    }
    Ok(device.clone().inner().sync()?)
}

/// Takes `samples` samples of `steps` steps of each variant; none for 0.
pub(crate) fn interleave(
    variants: &mut [Variant],
    samples: usize,
    steps: usize,
    device: &Device,
    bar: &ProgressBar,
) -> Result<(), Box<dyn Error>> {
    let device = device.clone().inner();
    let rounds = match samples {
        0 => 0..0,
        // The first compiles kernels and allocates; it does not count.
        count => 0..count + 1,
    };
    for round in rounds {
        // Each round starts with another variant: whose memory is still warm must not decide.
        for turn in 0..variants.len() {
            let index = (round + turn) % variants.len();
            let variant = &mut variants[index];
            device.sync()?;
            let start = Instant::now();
            for _ in 0..steps {
                (variant.step)()?;
            }
            device.sync()?;
            if round > 0 {
                let elapsed = start.elapsed().as_secs_f64() * 1e3;
                variant.milliseconds.push(elapsed / steps as f64);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

fn median(mut samples: Vec<f64>) -> Option<f64> {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}
