//! Whether products of codes are fast enough.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use burn_lean_reparam::catch_quietly;

use super::Factors;
use crate::{NumberFormat, QuantParams, Scheme, fake_quantize};

/// Runs of which the fastest counts.
const RUNS: usize = 5;

/// A product that takes so many times as long is slower; clocks tell no more apart.
const SLOWER: f64 = 1.05;

/// Whether products of codes are fast enough, of shapes and schemes that were looked at.
#[derive(Debug)]
pub(crate) struct Speeds {
    pub(super) known: HashMap<String, Result<(), String>>,
    /// Numbers in the rest of the model.
    pub(super) others: usize,
    /// Kept from comparison to comparison.
    pub(super) rest: Rest,
}

impl Speeds {
    /// In a model of so many parameters.
    pub(crate) fn of(parameters: usize) -> Self {
        Self {
            known: HashMap::new(),
            others: parameters,
            rest: Rest::default(),
        }
    }
}

/// So many numbers are beyond the caches of a CPU.
const BEYOND_CACHES: usize = 1 << 24;

/// What a forward pass reads between two uses of a weight: in a large model none finds its numbers in a cache.
#[derive(Debug, Default)]
pub(super) struct Rest(Vec<f32>);

impl Rest {
    /// From now on, so many numbers.
    pub(super) fn resize(&mut self, numbers: usize) {
        self.0.resize(numbers.min(BEYOND_CACHES), 1.0);
    }

    fn read(&self) {
        // A number of each line of 64 bytes.
        let sum: f32 = self.0.iter().step_by(16).sum();
        std::hint::black_box(sum);
    }
}

/// What an input goes through before values are multiplied: where a kernel rounds it to codes, a layer of values
/// rounds it, too, for which one range for all is the least work.
#[derive(Debug)]
pub(super) struct Rounding(Option<(QuantParams, Scheme)>);

impl Rounding {
    pub(super) fn of(factors: Factors, device: &Device) -> Self {
        let scale = || Tensor::<1>::ones([1], device);
        Self((factors != Factors::Floats).then(|| {
            let qparams = QuantParams {
                zero_point: scale().zeros_like(),
                scale: scale(),
            };
            (qparams, Scheme::symmetric(NumberFormat::int8()))
        }))
    }

    pub(super) fn apply<const D: usize>(&self, x: &Tensor<D>) -> Tensor<D> {
        match &self.0 {
            Some((qparams, scheme)) => fake_quantize(x.clone(), qparams, scheme),
            None => x.clone(),
        }
    }
}

/// Compares a product of floats with that of codes, which are `of` something; the rest of a model is read before each.
///
/// # Errors
///
/// How many times as long that of codes takes, where it is slower.
pub(super) fn compare<const D: usize>(
    device: &Device,
    rest: &Rest,
    [of_values, of_codes]: [&dyn Fn() -> Tensor<D>; 2],
    of: &str,
) -> Result<(), String> {
    let (mut floats, mut codes) = (Duration::MAX, Duration::MAX);
    // The first of each compiles.
    for run in 0..=RUNS {
        rest.read();
        let with_floats = time(device, of_values)?;
        rest.read();
        let with_codes = time(device, of_codes)?;
        if run > 0 {
            (floats, codes) = (floats.min(with_floats), codes.min(with_codes));
        }
    }
    let times = codes.as_secs_f64() / floats.as_secs_f64().max(f64::MIN_POSITIVE);
    match times > SLOWER {
        true => Err(format!(
            "the {of} and its codes takes {times:.1} times as long as that with its floats"
        )),
        false => Ok(()),
    }
}

fn time<const D: usize>(
    device: &Device,
    multiply: &dyn Fn() -> Tensor<D>,
) -> Result<Duration, String> {
    let timed = || {
        device.sync()?;
        let start = Instant::now();
        let y = multiply();
        device.sync()?;
        drop(y);
        Ok(start.elapsed())
    };
    let time = catch_quietly(timed)?;
    time.map_err(|error: burn::backend::ExecutionError| error.to_string())
}
