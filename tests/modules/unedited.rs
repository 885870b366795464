//! Every module of burn-nn through `Autocast::run`: no region, no edit, at every magnitude.
//!
//! The input of a module is a half activation of the given magnitude, exactly representable, so
//! that the FP32 reference sees the same numbers. What is compared is the gradient of the input
//! and of all parameters, at the largest loss scale at which they are finite, which a dynamic
//! scaler finds; and what the module gives, for losses the loss.
//!
//! The bound is that of the region's test: three times the roundings on the longest path, relative
//! to the norm of all gradients together, and for the input to its own; of outputs it is once the
//! roundings, relative to their norm. Where an exponential or a
//! saturating function takes a product in half, the rounding of the product, relative to its size, is
//! an absolute error of the exponent: there the bound grows with the magnitude, until it is half of a
//! gradient and says nothing any more. What is beyond that is no result: no range has it, and the test
//! prints it. A product whose sum is above 65,504 is infinite in F16, whatever the recipe; there, and
//! only there, nothing finite is asked for.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, ModuleDisplay, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{AmpError, Autocast, AutocastConfig, Fallback, GraphError};

use crate::entry::{BATCH, Case, Entry, Form, Precision, WIDTH, Way};
use crate::support::{self, nearest, numbers};
use crate::{for_every_module, within};

/// What is compared at one magnitude.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Loss in FP32 and under autocast.
    pub(crate) losses: (f32, f32),
    /// Outputs in FP32 and under autocast; of what is outside of regions, the loss.
    pub(crate) outputs: (Vec<f32>, Vec<f32>),
    /// Gradients in FP32 and under autocast, the input's first; none where the device has no backward pass.
    pub(crate) gradients: Vec<(String, Vec<f32>, Vec<f32>)>,
}

/// A model around a module that shows its input as a parameter.
#[derive(Module, Debug)]
pub(crate) struct Fed<M: Module> {
    input: Param<Tensor<2>>,
    layer: M,
}

impl<M, B, F, L> Case<M, B, F, L>
where
    M: Module + ModuleDisplay,
    B: Fn(&Device) -> M,
    F: Fn(&M, Tensor<2>) -> Tensor<2>,
    L: Fn(Tensor<2>) -> Tensor<1>,
{
    fn fed(&self, device: &Device, magnitude: f32, random: bool) -> Fed<M> {
        let layer = support::with_numbers((self.build)(device), 1);
        let input = half_numbers(magnitude);
        Fed {
            input: Param::from_data(burn::tensor::TensorData::new(input, [BATCH, WIDTH]), device),
            // Random numbers depend on the dtype: compared is the form that the module has in inference.
            layer: match random {
                true => layer.freeze(),
                false => layer,
            },
        }
    }

    fn output(&self, output: Tensor<2>, loss: &Tensor<1>) -> Vec<f32> {
        match self.way {
            Way::OutsideInFp32 => support::values(loss.clone()),
            _ => support::values(output),
        }
    }

    pub(crate) fn measure(
        &self,
        route: &Route,
        precision: &Precision,
        magnitude: f32,
        form: Form,
    ) -> Result<Measured, AmpError> {
        let flex = Device::flex().autodiff();
        let model = self.fed(&flex, magnitude, form.random);
        let output = (self.forward)(&model.layer, model.input.val());
        let loss = (self.loss)(output.clone());
        let fp32_output = self.output(output, &loss);
        let fp32_loss = loss.clone().into_scalar::<f32>();
        let mut fp32 = Vec::new();
        if form.has_backward {
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            fp32 = support::gradients(&model, grads);
        }

        let device = precision.target.device.clone().autodiff();
        let model = self.fed(&device, magnitude, form.random);
        // A product with one is half, and exact.
        let one = Tensor::<2>::eye(WIDTH, &device);
        let mut gradients = Vec::new();
        let (mut amp_loss, mut amp_output) = (f32::NAN, Vec::new());
        let largest = fp32
            .iter()
            .flat_map(|(_, _, values)| values)
            .fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
        for scale in scales(precision.dtype, largest) {
            let h = |model: &Fed<M>, one| model.input.val().matmul(one);
            let (output, loss) = match route {
                Route::Run(autocast) => autocast.run(&model, one.clone(), |model, one| {
                    let output = (self.forward)(&model.layer, h(model, one));
                    (output.clone(), (self.loss)(output))
                })?,
                Route::Region(config) => {
                    let (prepared, autocast) = config.prepare(model.clone())?;
                    let output = autocast.forward(one.clone(), |one| {
                        self.in_region(&prepared.layer, h(&prepared, one))
                    });
                    (output.clone(), (self.loss)(output))
                }
            };
            amp_output = self.output(output, &loss);
            amp_loss = loss.clone().into_scalar::<f32>();
            if !form.has_backward {
                break;
            }
            let amp = GradientsParams::from_grads(loss.mul_scalar(scale).backward(), &model);
            gradients = support::gradients(&model, amp)
                .into_iter()
                .map(|(path, dtype, values)| {
                    assert_eq!(dtype, DType::F32, "gradient of {path}");
                    let values = values.into_iter().map(|value| value / scale);
                    (path, values.collect())
                })
                .collect::<Vec<(String, Vec<f32>)>>();
            let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
            if gradients.iter().all(|(_, values)| finite(values)) {
                break;
            }
        }
        assert_eq!(
            fp32.iter().map(|(path, ..)| path).collect::<Vec<_>>(),
            gradients.iter().map(|(path, ..)| path).collect::<Vec<_>>(),
            "parameters with a gradient"
        );
        Ok(Measured {
            losses: (fp32_loss, amp_loss),
            outputs: (fp32_output, amp_output),
            gradients: fp32
                .into_iter()
                .zip(gradients)
                .map(|((path, _, fp32), (_, amp))| (path, fp32, amp))
                .collect(),
        })
    }
}

/// The loss scales to try, from above, as a dynamic scaler comes down to the one that fits: the
/// first brings the largest gradient to the largest number of F16.
fn scales(dtype: FloatDType, largest: f32) -> Vec<f32> {
    match dtype {
        FloatDType::F16 => {
            let first = (65_504.0 / largest).log2().floor().clamp(-60.0, 100.0);
            (0..10)
                .map(|step| (first - 4.0 * step as f32).exp2())
                .collect()
        }
        _ => vec![1.0],
    }
}

/// How a module goes through AMP.
pub(crate) enum Route {
    /// Operation by operation, unedited.
    Run(Autocast),
    /// In an autocast region, with a full-precision region where the table says so.
    Region(AutocastConfig),
}

/// Numbers up to `magnitude` that F16 and BF16 have both.
fn half_numbers(magnitude: f32) -> Vec<f32> {
    numbers(7, BATCH * WIDTH)
        .into_iter()
        .map(|x| nearest(FloatDType::BF16, x * magnitude))
        .collect()
}

/// At 40 an exponential is above the range of F16, and within that of F32.
const MAGNITUDES: [f32; 6] = [1.0, 10.0, 40.0, 100.0, 1000.0, 30_000.0];

/// Up to which magnitude of its input a module has outputs and gradients in an F16 region on flex that are
/// known to be right; `None` for what is called outside of regions.
pub(crate) fn range_in_region(entry: &Entry) -> Option<f32> {
    if entry.way == Way::OutsideInFp32 {
        return None;
    }
    let precision = crate::flex_in_f16();
    let route = Route::Region(AutocastConfig::new(precision.dtype));
    let fits = |magnitude: &f32| {
        let measured = catch_unwind(AssertUnwindSafe(|| {
            entry.measured(&route, &precision, *magnitude)
        }));
        let Ok(Ok(found)) = measured else {
            return false;
        };
        check(&found, &route, &precision, entry, *magnitude).is_ok()
    };
    MAGNITUDES.into_iter().take_while(fits).last()
}

/// What a module does with its products.
#[derive(Clone, Copy, PartialEq)]
enum Products {
    /// It has none, or only sums them up.
    Plain,
    /// They go into exponentials or saturating functions: attention, gates.
    Saturated,
}

fn products(name: &str) -> Products {
    let saturated = [
        "Attention",
        "Transformer",
        "MhaCache",
        "Lstm",
        "Gru",
        "Rnn",
        "GateController",
        "SwiGlu",
        "PositionWiseFeedForward",
    ];
    match saturated.iter().any(|part| name.contains(part)) && name != "RNNTLoss" {
        true => Products::Saturated,
        false => Products::Plain,
    }
}

/// What Burn does not let a recording see, and what it says.
const NOT_RECORDED: [(&str, &str); 2] = [
    // Its parameters are in a field that Burn's modules skip, also when they move to a device.
    (
        "PositionWiseFeedForward with SwiGlu or PRelu inside",
        "wrong backend",
    ),
    // It looks at its targets.
    ("PoissonNllLoss", "reading data"),
];

#[test]
fn outputs_and_gradients_are_right_at_every_magnitude_without_an_edit() {
    for_every_module(|entry, precision| {
        if !entry.has_backward(precision) {
            return Ok(());
        }
        // Its gradients are verified at the first magnitude.
        let autocast = Autocast::new(precision.dtype).with_fallback(match precision.emulated {
            true => Fallback::Emulate,
            false => Fallback::Error,
        });
        let route = Route::Run(autocast);
        let (mut failures, mut unknown) = (Vec::new(), Vec::new());
        for magnitude in MAGNITUDES {
            let result = entry.measured(&route, precision, magnitude);
            let refused = NOT_RECORDED.iter().find(|(name, _)| *name == entry.name);
            let result = match (result, refused) {
                (Ok(measured), None) => check(&measured, &route, precision, entry, magnitude),
                (Err(AmpError::Graph(GraphError::Forward { reason, .. })), Some((_, why)))
                    if reason.contains(why) =>
                {
                    Ok(())
                }
                (Err(error), _) => Err(Doubt::Wrong(error.to_string())),
                (Ok(_), Some(_)) => Err(Doubt::Wrong(
                    "it can be recorded now: take it off the list".into(),
                )),
            };
            match result {
                Ok(()) => {}
                Err(Doubt::Wrong(failure)) => failures.push(format!("at {magnitude}: {failure}")),
                // Of ordinary activations F16 says something everywhere.
                Err(Doubt::NoBound) if magnitude == 1.0 && precision.dtype == FloatDType::F16 => {
                    failures.push(format!("at {magnitude}: no bound"));
                }
                Err(Doubt::NoBound) => unknown.push(magnitude),
            }
        }
        if !unknown.is_empty() {
            let (name, device, dtype) = (entry.name, precision.target.name, precision.dtype);
            println!("{name} on {device} in {dtype:?}: no bound at {unknown:?}");
        }
        match failures.is_empty() {
            true => Ok(()),
            false => Err(failures.join("; ")),
        }
    });
}

/// Why outputs and gradients are not known to be right.
#[derive(Debug)]
pub(crate) enum Doubt {
    /// They are off by more than rounding.
    Wrong(String),
    /// The bound of rounding says nothing, or FP32 has no gradient there, either.
    NoBound,
}

/// Gradients that are all zero are off by the whole; from half of it on a bound says nothing.
const NO_BOUND: f32 = 0.5;

pub(crate) fn check(
    measured: &Measured,
    route: &Route,
    precision: &Precision,
    entry: &Entry,
    magnitude: f32,
) -> Result<(), Doubt> {
    let whole = measured
        .gradients
        .iter()
        .map(|(_, fp32, _)| crate::norm(fp32).powi(2))
        .sum::<f32>()
        .sqrt();
    if !whole.is_finite() {
        return Err(Doubt::NoBound);
    }
    // In a full-precision region no product is rounded.
    let in_f32 = matches!(route, Route::Region(_))
        && matches!(
            entry.way,
            Way::KeptInFp32CalledInRegion | Way::CalledInRegion
        );
    let saturated = products(entry.name) == Products::Saturated && !in_f32;
    let overflows = saturated && precision.dtype == FloatDType::F16 && magnitude >= 1000.0;
    let (fp32, amp) = measured.losses;
    if !amp.is_finite() && !overflows {
        return Err(Doubt::Wrong(format!("the loss is {amp}, in FP32 {fp32}")));
    }
    let conditioning = if saturated { magnitude } else { 1.0 };
    let roundings = (crate::FRONT + entry.roundings) as f32;
    // The difference of two distances of this size is what F32 leaves of it.
    let cancellation = match entry.name {
        "TripletMarginLoss" => 8.0 * f32::EPSILON * magnitude,
        _ => 0.0,
    };
    let rounding = precision.unit_roundoff() * roundings * conditioning;
    let (fp32, amp) = &measured.outputs;
    let size = crate::norm(fp32);
    if !size.is_finite() {
        return Err(Doubt::NoBound);
    }
    let error = crate::distance(fp32, amp) / size.max(f32::MIN_POSITIVE);
    if !overflows || error.is_finite() {
        within(error, rounding + cancellation, "output").map_err(Doubt::Wrong)?;
    }
    let tolerance = 3.0 * rounding + cancellation;
    // Of ordinary activations a gradient is asked for, whatever the bound.
    let bound = match magnitude == 1.0 {
        true => tolerance.min(NO_BOUND),
        false => tolerance,
    };
    for (path, fp32, amp) in &measured.gradients {
        let error = crate::distance(fp32, amp);
        if !error.is_finite() && overflows {
            continue;
        }
        if !error.is_finite() {
            let failure = format!("the gradient of {path} is not finite at any scale");
            return Err(Doubt::Wrong(failure));
        }
        // The input's own gradient is what goes on to the layers before; that of some parameters is
        // zero but for rounding.
        let size = match path.as_str() {
            "input" => crate::norm(fp32).max(1e-12 * whole),
            _ => whole,
        };
        let error = error / size.max(f32::MIN_POSITIVE);
        within(error, bound, path).map_err(Doubt::Wrong)?;
    }
    match tolerance < NO_BOUND {
        true => Ok(()),
        false => Err(Doubt::NoBound),
    }
}
