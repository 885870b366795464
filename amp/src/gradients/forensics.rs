//! Gradient forensics: what a gradient looks like, and which loss scale it calls for.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use burn_lean_reparam::{FloatVisitor, own_copy, reductions};
use serde::{Deserialize, Serialize};

use crate::AmpError;
use crate::gradients::{Reads, check_loss, visit_once};

/// The gradient of one parameter, counted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterGradient {
    /// Path of the parameter.
    pub path: String,
    /// All elements.
    pub elements: usize,
    /// Elements that are exactly zero: in a half-precision backward pass, those that underflowed
    /// (and those that are zero anyway, behind a ReLU for instance).
    pub zeros: usize,
    /// Elements that are infinite or NaN.
    pub non_finite: usize,
    /// Largest finite magnitude; 0 where no element is finite.
    pub largest_finite: f32,
}

/// Counts zeros and non-finite elements of every gradient, scaled or not.
///
/// A parameter whose gradient is all zeros although it should learn is the silent failure of
/// half-precision training: the loss stays finite and nothing is skipped. This reads from the
/// device (once).
///
/// # Errors
///
/// [`AmpError::Device`] when the read fails.
pub fn inspect_gradients<M: Module>(
    model: &M,
    grads: &GradientsParams,
) -> Result<Vec<ParameterGradient>, AmpError> {
    Described::of(model, grads, None).read()
}

/// What there is to say of gradients, on the device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Described(Vec<Counted>);

#[derive(Debug, Clone)]
struct Counted {
    path: String,
    elements: usize,
    zeros: Tensor<1, Int>,
    non_finite: Tensor<1, Int>,
    largest_finite: Tensor<1>,
}

impl Described {
    /// Describes all gradients, or those at the paths `only`; nothing is read.
    pub(crate) fn of<M: Module>(
        model: &M,
        grads: &GradientsParams,
        only: Option<&[String]>,
    ) -> Self {
        if only.is_some_and(|only| only.is_empty()) {
            return Self::default();
        }
        let mut visitor = Count {
            grads,
            only,
            found: Vec::new(),
        };
        visit_once(model, &mut visitor);
        Self(visitor.found)
    }

    /// Reads from the device (once).
    pub(crate) fn read(&self) -> Result<Vec<ParameterGradient>, AmpError> {
        let mut reads = Reads::default();
        for found in &self.0 {
            reads.register(found.zeros.clone());
            reads.register(found.non_finite.clone());
            reads.register(found.largest_finite.clone());
        }
        let data = reads.wait()?;
        let count = |data: &TensorData| data.iter::<i64>().next().unwrap_or(0) as usize;
        let read = self.0.iter().zip(data.chunks_exact(3));
        let read = read.map(|(found, data)| ParameterGradient {
            path: found.path.clone(),
            elements: found.elements,
            zeros: count(&data[0]),
            non_finite: count(&data[1]),
            largest_finite: data[2].iter::<f32>().next().unwrap_or(0.0),
        });
        Ok(read.collect())
    }
}

struct Count<'a> {
    grads: &'a GradientsParams,
    only: Option<&'a [String]>,
    found: Vec<Counted>,
}

impl FloatVisitor for Count<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(only) = self.only
            && !only.iter().any(|wanted| wanted == path)
        {
            return;
        }
        let Some(grad) = self.grads.get::<D>(param.id) else {
            return;
        };
        let elements = grad.shape().num_elements();
        if elements == 0 {
            return;
        }
        let bad = grad.clone().is_finite().bool_not();
        self.found.push(Counted {
            path: path.to_string(),
            elements,
            zeros: grad.clone().equal_elem(0.0).int().sum(),
            non_finite: bad.clone().int().sum(),
            largest_finite: reductions::max(grad.mask_fill(bad, 0.0).abs()),
        });
    }
}

/// Gradient magnitudes of an FP32 backward pass, and the loss scale they call for.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_lean_amp::{DynamicLossScale, GradScalerConfig, LossScale, calibrate_scale};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 1).with_bias(false).init(&device);
/// let calibration = calibrate_scale(&model, FloatDType::F16, |model| {
///     // Gradient 2⁻²⁰ for each weight.
///     model.forward(Tensor::<2>::ones([1, 4], &device)).mean() * (1.0 / 1048576.0)
/// })?;
/// // 65504 / (2⁻²⁰ · 16), rounded down to a power of two.
/// assert_eq!(calibration.loss_scale, 2f32.powi(31));
/// // All four would survive unscaled; at 1/64 of that, none.
/// assert_eq!(calibration.underflow(1.0), 0.0);
/// assert_eq!(calibration.underflow(1.0 / 64.0), 1.0);
///
/// let scaler = GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
///     init_scale: calibration.loss_scale,
///     ..Default::default()
/// }))
/// .init()?;
/// # Ok::<(), burn_lean_amp::AmpError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScaleCalibration {
    /// Proposed initial loss scale: the largest power of two that keeps the largest gradient at
    /// least 16 times below the largest finite number of the dtype. 1 when all gradients are
    /// zero, and for dtypes with the exponents of F32.
    pub loss_scale: f32,
    /// The dtype it is for.
    pub dtype: FloatDType,
    /// Largest magnitude.
    pub largest: f32,
    /// All gradient elements.
    pub elements: u64,
    /// Elements that are exactly zero in F32.
    pub zeros: u64,
    /// Elements by binary exponent: `e` counts those in `[2ᵉ, 2ᵉ⁺¹)`.
    pub histogram: BTreeMap<i32, u64>,
}

/// Room left above the largest weight gradient: the gradients of activations, which pass through
/// half precision too but are not seen here, may be larger, and later batches differ.
const HEADROOM: f64 = 16.0;

impl ScaleCalibration {
    /// Fraction of the non-zero gradients that become zero in the dtype at a loss scale, 0 to 1.
    ///
    /// Counted by binade: exact for scales that are powers of two, up to the elements that are
    /// exactly half the smallest subnormal.
    pub fn underflow(&self, loss_scale: f32) -> f64 {
        // Below half the smallest subnormal everything rounds to zero.
        let lost_below = match self.dtype {
            FloatDType::F16 => -25,
            FloatDType::BF16 => -134,
            _ => -150,
        };
        let shift = f64::from(loss_scale).log2();
        let non_zero: u64 = self.histogram.values().sum();
        let lost: u64 = self
            .histogram
            .iter()
            .filter(|(exponent, _)| f64::from(**exponent) + shift < f64::from(lost_below))
            .map(|(_, count)| count)
            .sum();
        lost as f64 / non_zero.max(1) as f64
    }
}

/// One FP32 forward and backward pass, and the loss scale its gradients call for.
///
/// `loss` computes the loss (F32 or F64, shape `[1]`) of one or more batches, *outside* of an autocast
/// region. Starting from the proposed scale saves the skipped steps with which dynamic scaling
/// finds it. The gradients are read to the host: meant for once, not for every step. `loss` is given a copy with
/// running statistics of its own: those of `model` stay as they are, also where the batch is not finite.
///
/// # Errors
///
/// [`AmpError::LossDtype`], [`AmpError::NoGradients`], [`AmpError::Device`], and
/// [`AmpError::NotFiniteInF32`] when a gradient of the FP32 pass itself is not finite.
pub fn calibrate_scale<M: Module>(
    model: &M,
    dtype: FloatDType,
    loss: impl FnOnce(&M) -> Tensor<1>,
) -> Result<ScaleCalibration, AmpError> {
    let copy = own_copy(model);
    let loss = loss(&copy);
    check_loss(&loss)?;
    if !loss.is_tracked() {
        return Err(AmpError::NoGradients);
    }
    let grads = GradientsParams::from_grads(loss.backward(), &copy);
    let mut visitor = Collect {
        grads: &grads,
        paths: Vec::new(),
        reads: Reads::default(),
    };
    visit_once(&copy, &mut visitor);
    let Collect {
        paths, mut reads, ..
    } = visitor;
    reads.register(loss.without_autodiff());
    if paths.is_empty() {
        return Err(AmpError::NoGradients);
    }
    let mut calibration = ScaleCalibration {
        loss_scale: 1.0,
        dtype,
        largest: 0.0,
        elements: 0,
        zeros: 0,
        histogram: BTreeMap::new(),
    };
    let data = reads.wait()?;
    for (path, gradients) in paths.iter().zip(&data) {
        for gradient in gradients.iter::<f32>() {
            if !gradient.is_finite() {
                let loss = data.last().and_then(|loss| loss.iter::<f32>().next());
                return Err(AmpError::NotFiniteInF32 {
                    parameter: path.clone(),
                    loss: loss.unwrap_or(f32::NAN),
                });
            }
            calibration.count(gradient.abs());
        }
    }
    if dtype == FloatDType::F16 && calibration.largest > 0.0 {
        let limit = half::f16::MAX.to_f64() / (f64::from(calibration.largest) * HEADROOM);
        // Larger scales would themselves leave the range of F32 together with the loss; smaller ones than the
        // smallest normal number would lose digits.
        calibration.loss_scale = limit.log2().floor().clamp(-126.0, 100.0).exp2() as f32;
    }
    Ok(calibration)
}

impl ScaleCalibration {
    fn count(&mut self, magnitude: f32) {
        self.elements += 1;
        if magnitude == 0.0 {
            self.zeros += 1;
            return;
        }
        self.largest = self.largest.max(magnitude);
        // In F64 every F32, subnormals included, is normal: the exponent field is exact.
        let exponent = ((f64::from(magnitude).to_bits() >> 52) & 0x7ff) as i32 - 1023;
        *self.histogram.entry(exponent).or_default() += 1;
    }
}

struct Collect<'a> {
    grads: &'a GradientsParams,
    paths: Vec<String>,
    reads: Reads,
}

impl FloatVisitor for Collect<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.get::<D>(param.id) {
            self.paths.push(path.to_string());
            self.reads.register(grad);
        }
    }
}
