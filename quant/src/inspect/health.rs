//! How well each quantizer of a model does on real data.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::tensor::{Tensor, Transaction};
use serde::{Deserialize, Serialize};

use crate::format::groups::Groups;
use crate::module::listen::listener::{Listener, listening, lock};
use crate::module::listen::watch::Seen;
use crate::table::{decibels, percent, table};
use crate::{Granularity, QuantError, Scheme, Site, module::RunOutcome, quantizers};

/// What [`health`] found: one entry for each quantizer that saw data, in module order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// The quantizers.
    pub quantizers: Vec<QuantizerHealth>,
}

/// What a quantizer did to the values that passed through it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizerHealth {
    /// Path of the quantizer.
    pub path: String,
    /// Path of the weight that carries it, or its own.
    pub layer: String,
    /// What it quantizes.
    pub site: Site,
    /// Its scheme.
    pub scheme: Scheme,
    /// Values that passed.
    pub values: usize,
    /// Signal to quantization noise ratio, 10 · log₁₀(Σx² / Σ(x−y)²), in dB; infinite without noise.
    #[serde(with = "crate::table::float")]
    pub sqnr: f64,
    /// Fraction of the values that were clipped, 0 to 1: those whose rounded number was beyond the format, and NaN,
    /// which get no gradient in [`fake_quantize`](crate::fake_quantize()).
    pub clipped: f64,
    /// Channels that are nothing but zeros once quantized; per-channel schemes only.
    pub dead_channels: Option<usize>,
}

/// Runs sample data through `model` and reports on every quantizer that it came by.
///
/// `run` gets the model as it is after training, on its device without autodiff; its quantizers
/// only use their ranges. It may call the model, or clones of it, on any thread.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_quant::{FakeQuantizeConfig, NumberFormat, Scheme, health, fake::Range};
///
/// let device = Device::flex();
/// let range = Range {
///     min: Tensor::from_floats([-1.0], &device),
///     max: Tensor::from_floats([1.0], &device),
/// };
/// let scheme = Scheme::symmetric(NumberFormat::int(2).narrow());
/// let quantizer = FakeQuantizeConfig::new(scheme).init(&device)?.with_range(range);
/// let health = health(&quantizer, |quantizer| {
///     quantizer.forward(Tensor::<1>::from_floats([1.0, 1.0, 0.0, 3.0], &device));
/// })?;
/// let found = &health.quantizers[0];
/// // 3 became 1: Σx² = 11, Σ(x−y)² = 4.
/// assert_eq!(found.clipped, 0.25);
/// assert!((found.sqnr - 10.0 * (11f64 / 4.0).log10()).abs() < 1e-6);
/// # Ok::<(), burn_lean_quant::QuantError>(())
/// ```
///
/// # Errors
///
/// [`QuantError::NoData`] if no value passed through any quantizer that quantizes.
pub fn health<M: Module, R: RunOutcome>(
    model: &M,
    run: impl FnOnce(&M) -> R,
) -> Result<Health, QuantError> {
    let sums = Arc::new(Mutex::new(BTreeMap::<String, Sums>::new()));
    let watched = sums.clone();
    let watcher = move |seen: &Seen<'_>| {
        let next = Sums::of(seen);
        match lock(&watched).entry(seen.path.to_string()) {
            Entry::Occupied(mut sums) => sums.get_mut().add(next),
            Entry::Vacant(place) => drop(place.insert(next)),
        }
    };
    let listener = Listener::Watcher(Arc::new(watcher));
    let model = listening(model, &listener);
    run(&model).outcome()?;
    let sums = std::mem::take(&mut *lock(&sums));
    if sums.is_empty() {
        return Err(QuantError::NoData {
            what: "every quantizer of the model".into(),
        });
    }
    let mut transaction = Transaction::default();
    for sums in sums.values() {
        transaction = transaction
            .register(sums.totals.clone())
            .register(sums.magnitude.clone());
    }
    let data = transaction.try_execute().map_err(QuantError::device)?;
    let numbers: Vec<Vec<f32>> = data
        .iter()
        .map(|data| data.iter::<f32>().collect())
        .collect();
    let mut found: BTreeMap<&str, (&Sums, &[Vec<f32>])> = BTreeMap::new();
    for ((path, sums), numbers) in sums.iter().zip(numbers.chunks_exact(2)) {
        found.insert(path, (sums, numbers));
    }
    let reports = quantizers(&model).into_iter().filter_map(|located| {
        let (sums, numbers) = found.get(located.path.as_str())?;
        let [signal, noise, clipped] = numbers[0][..] else {
            return None;
        };
        let per_channel = matches!(sums.scheme.granularity, Granularity::PerChannel { .. });
        Some(QuantizerHealth {
            layer: located.parameter.unwrap_or_else(|| located.path.clone()),
            path: located.path,
            site: located.site,
            scheme: sums.scheme.clone(),
            values: sums.values,
            sqnr: decibels(f64::from(signal), f64::from(noise)),
            clipped: f64::from(clipped) / sums.values as f64,
            dead_channels: per_channel.then(|| {
                numbers[1]
                    .iter()
                    .filter(|magnitude| **magnitude == 0.0)
                    .count()
            }),
        })
    });
    Ok(Health {
        quantizers: reports.collect(),
    })
}

/// What is added up over the passes through one quantizer, on the device.
struct Sums {
    scheme: Scheme,
    groups: Groups,
    values: usize,
    /// Σx², Σ(x−y)², clipped values.
    totals: Tensor<1>,
    /// Mean magnitudes that went out of each group, added up: 0 if nothing but zeros did.
    magnitude: Tensor<1>,
}

impl Sums {
    fn of(seen: &Seen<'_>) -> Self {
        Self {
            scheme: seen.scheme.clone(),
            groups: seen.groups.clone(),
            values: seen.shape.iter().product(),
            totals: totals(seen),
            magnitude: seen.groups.mean(seen.y.clone().abs()),
        }
    }

    /// Adds what a few numbers for each group are.
    fn add(&mut self, next: Self) {
        self.values += next.values;
        self.totals = self.totals.clone() + next.totals;
        // Another number of tokens is another number of groups.
        if self.groups.count() == next.groups.count() {
            self.magnitude = self.magnitude.clone() + next.magnitude;
        }
    }
}

fn totals(seen: &Seen<'_>) -> Tensor<1> {
    let (x, y) = (seen.x.clone(), seen.y.clone());
    let signal = x.clone().square().sum();
    let noise = (x - y).square().sum();
    let clipped = seen.clipped.clone().sum();
    Tensor::cat(vec![signal, noise, clipped], 0)
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(&[
            "quantizer",
            "scheme",
            "SQNR [dB]",
            "clipped [%]",
            "dead channels",
        ]);
        for quantizer in &self.quantizers {
            let dead = quantizer.dead_channels;
            table.add_row([
                quantizer.path.clone(),
                quantizer.scheme.to_string(),
                format!("{:.1}", quantizer.sqnr),
                percent(quantizer.clipped),
                dead.map_or("-".into(), |dead| dead.to_string()),
            ]);
        }
        write!(f, "{table}")
    }
}
