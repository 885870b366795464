//! Whether a matrix product may read the codes of a weight themselves.
//!
//! Of a quantized weight, [`linear`] hands the codes to the device's own product, where there is one: a
//! GPU reads a quarter of the bytes, and keeps no floats. On a CPU there is none, and a kernel of our own
//! takes its place, in convolutions, too. Whether the numbers are right for this shape and
//! layout, and whether it is fast, differs from device to device. So it is looked at here, once for each
//! weight, before a layer depends on it.
//!
//! Right are the sums of combs: row r of 64 multiplies every 64th input from r on by 1 or −1, so that
//! each number of the weight is in exactly one sum, of few terms, which the host adds in F64. The product
//! may be as far from them as F32 sums of so many terms can be, or as the device's own product of floats is.

mod comb;
#[cfg(feature = "kernels")]
mod convolution;
mod speed;

use std::any::Any;
use std::collections::HashMap;

use burn::tensor::module::linear;
use burn::tensor::quantization::{QuantScheme, QuantValue};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean_reparam::{Trail, catch_quietly};

#[cfg(feature = "kernels")]
use crate::codes::kernel::Packed;
use crate::codes::stored::Stored;
use crate::fake::op::to_dtype;
use crate::module::resident::on_host;
use crate::module::walk::{Located, Site};
use crate::range::observer::read;
use crate::{Dequantize, FakeQuantize, Granularity, QuantizedTensor};
use comb::Comb;
#[cfg(feature = "kernels")]
use convolution::Convolution;
use speed::{Rest, Rounding};

pub(crate) use speed::Speeds;

/// Rows of an input that products are looked at with: a device has other kernels for few.
const ROWS: [usize; 3] = [1, 8, 64];

/// What a kernel multiplies by the codes of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Factors {
    Floats,
    /// The codes of a rounded input.
    Integers,
    /// The same, with a scale for each row.
    IntegersOfRows,
}

impl Factors {
    /// In a layer whose input has this quantizer, if any.
    pub(crate) fn of(input: Option<&FakeQuantize>) -> Self {
        let Some(input) = input.filter(|input| input.is_enabled()) else {
            return Self::Floats;
        };
        let scheme = input.scheme();
        match &scheme.granularity {
            _ if !scheme.format.is_int() => Self::Floats,
            Granularity::PerTensor => Self::Integers,
            Granularity::PerToken => Self::IntegersOfRows,
            _ => Self::Floats,
        }
    }

    /// Of all weights of a model that carry a quantizer, by path.
    pub(crate) fn of_all(quantizers: &[Located]) -> HashMap<String, Self> {
        let paths = |site: Site| {
            let of_site = quantizers
                .iter()
                .filter(move |located| located.site == site);
            of_site.filter_map(|located| Some((located.parameter.clone()?, &located.quantizer)))
        };
        let inputs: HashMap<String, &FakeQuantize> = paths(Site::Input).collect();
        paths(Site::Weight)
            .map(|(path, _)| {
                let factors = Self::of(inputs.get(&path).copied());
                (path, factors)
            })
            .collect()
    }
}

impl<'a> Layer<'a> {
    /// Around the weight at this place.
    pub(crate) fn at(place: &'a Trail, dtype: FloatDType, factors: Option<Factors>) -> Self {
        Self {
            kind: place.container(),
            dtype,
            factors,
        }
    }
}

/// The layer of a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer<'a> {
    /// As Burn's modules call it.
    pub(crate) kind: &'a str,
    /// Of the weight's values.
    pub(crate) dtype: FloatDType,
    /// What a kernel would multiply by; `None` where the weight carries no quantizer that could tell it.
    pub(crate) factors: Option<Factors>,
}

/// A kernel that multiplies by codes, if one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Kernel {
    /// What it keeps beside what Burn holds.
    pub(crate) bytes: usize,
    /// Whether it multiplies integers.
    pub(crate) is_integer: bool,
}

/// Looks at the product of a weight that is held so, `None` for floats, in such a layer.
///
/// [`Dequantize::InProduct`] needs one that is exact and not slower, on a CPU that of a kernel;
/// [`Dequantize::EveryUse`] without a
/// quantizer between weight and layer one that is exact: Burn's linear layer multiplies by codes then,
/// other layers by floats.
///
/// # Errors
///
/// Why the layer is not to be given the codes: there is no such product, it is not exact, or it is
/// slower than that of floats.
pub(crate) fn in_product<const D: usize>(
    held: Option<&Stored<D>>,
    quantized: &QuantizedTensor,
    layer: Layer<'_>,
    asked: Dequantize,
    speeds: &mut Speeds,
) -> Result<Kernel, String> {
    let held = match held {
        _ if asked == Dequantize::Once => return Ok(Kernel::default()),
        Some(held) => held,
        None if asked == Dequantize::EveryUse => return Ok(Kernel::default()),
        None => return Err("it is not held as a quantized tensor".into()),
    };
    let is_in_product = asked == Dequantize::InProduct;
    let device = held.device();
    let (product, kernel): (Box<dyn Compared>, Kernel) = match held {
        _ if is_in_product && on_host(&device) => of_kernel(&device, quantized, layer)?,
        Stored::Values(stored) => {
            let is_given_floats = layer.kind != LINEAR || multiplies_floats(stored);
            if asked == Dequantize::EveryUse && is_given_floats {
                return Ok(Kernel::default());
            }
            let product = Product::of(stored, quantized, layer)?;
            (Box::new(product), Kernel::default())
        }
        Stored::Codes(_) => {
            return Err("its scales are not in Burn's tensor, which holds its codes alone".into());
        }
    };
    product.check()?;
    if is_in_product {
        let (shape, scheme) = (quantized.shape(), quantized.scheme());
        let (stored, Layer { dtype, factors, .. }) = (held.dtype(), layer);
        let key = format!("{shape:?} {scheme} {stored:?} {dtype:?} {factors:?} {device:?}");
        let Speeds {
            known,
            others,
            rest,
        } = speeds;
        let others = match on_host(&device) {
            true => others.saturating_sub(quantized.codes().len()),
            false => 0,
        };
        let compare = || {
            rest.resize(others);
            product.compare_speed(rest)
        };
        known.entry(key).or_insert_with(compare).clone()?;
    }
    Ok(kernel)
}

/// Whether the device has no other product of such a tensor than that of its floats, which were compared
/// when it was stored.
fn multiplies_floats<const D: usize>(stored: &Tensor<D>) -> bool {
    // ndarray adds and subtracts by codes of 2 bits.
    let is_ternary = |scheme: QuantScheme| scheme.value == QuantValue::Q2S;
    on_host(&stored.device())
        && !matches!(stored.dtype(), DType::QFloat(scheme) if is_ternary(scheme))
}

/// A product of codes beside that of the values that they stand for.
trait Compared {
    /// # Errors
    ///
    /// What is wrong with the product of codes on this device.
    fn check(&self) -> Result<(), String>;

    /// `rest` are the numbers of the model that are read between two products.
    ///
    /// # Errors
    ///
    /// With how many rows the product of codes is slower than that of floats, and by how much.
    fn compare_speed(&self, rest: &Rest) -> Result<(), String>;
}

/// The weight of a linear layer `[inputs, outputs]`: its codes, and its values.
#[derive(Debug)]
pub(crate) struct Product {
    codes: Codes,
    values: Tensor<2>,
    factors: Factors,
}

/// What multiplies by the codes.
#[derive(Debug)]
enum Codes {
    /// The device.
    Device(Box<Tensor<2>>),
    #[cfg(feature = "kernels")]
    Kernel(Box<Packed>),
}

const OTHER_LAYER: &str = "codes are multiplied by in linear layers alone";

/// On a CPU.
const OTHER_KERNEL: &str =
    "codes are multiplied by in linear layers and convolutions along one or two axes alone";

impl Product {
    /// That of the device.
    ///
    /// # Errors
    ///
    /// Why there is no such product.
    pub(crate) fn of<const D: usize>(
        stored: &Tensor<D>,
        quantized: &QuantizedTensor,
        layer: Layer<'_>,
    ) -> Result<Self, String> {
        let matrix = (stored as &dyn Any).downcast_ref::<Tensor<2>>();
        let Some(stored) = matrix.filter(|_| layer.kind == LINEAR) else {
            return Err(OTHER_LAYER.into());
        };
        let values = quantized.dequantize::<2>(&stored.device());
        Ok(Self {
            codes: Codes::Device(Box::new(stored.clone())),
            values: to_dtype(values.map_err(|error| error.to_string())?, layer.dtype),
            // It multiplies what the layer's quantizer gives.
            factors: Factors::Floats,
        })
    }

    /// The outputs of a linear layer without a bias.
    fn of_values(&self, x: &Tensor<2>) -> Tensor<2> {
        linear(x.clone(), self.values.clone(), None)
    }

    fn of_codes(&self, x: &Tensor<2>) -> Tensor<2> {
        match &self.codes {
            Codes::Device(stored) => linear(x.clone(), *stored.clone(), None),
            #[cfg(feature = "kernels")]
            Codes::Kernel(packed) => packed.of_comb(x),
        }
    }
}

impl Compared for Product {
    fn check(&self) -> Result<(), String> {
        let [inputs, outputs] = self.values.dims();
        let step = match self.values.dtype() {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => f64::from(f32::EPSILON),
        };
        let numbers = read(self.values.clone()).map_err(|error| error.to_string())?;
        for rows in ROWS {
            let comb = Comb { rows, inputs };
            let x = comb.tensor([rows, inputs], &self.values);
            let floats = numbers_of(|| self.of_values(&x))?;
            let codes = numbers_of(|| self.of_codes(&x))?;
            let sums = comb.times(&numbers, outputs);
            sums.judge([&floats, &codes], step, &format!("product of {rows} rows"))?;
        }
        Ok(())
    }

    fn compare_speed(&self, rest: &Rest) -> Result<(), String> {
        let [inputs, _] = self.values.dims();
        let device = self.values.device();
        let rounding = Rounding::of(self.factors, &device);
        for rows in ROWS {
            let x = Comb { rows, inputs }.tensor([rows, inputs], &self.values);
            let of_values = || self.of_values(&rounding.apply(&x));
            let both: [&dyn Fn() -> Tensor<2>; 2] = [&of_values, &|| self.of_codes(&x)];
            speed::compare(&device, rest, both, &format!("product of {rows} rows"))?;
        }
        Ok(())
    }
}

/// The product of a kernel, on a CPU.
///
/// # Errors
///
/// Why there is no such product.
#[cfg(feature = "kernels")]
fn of_kernel(
    device: &Device,
    quantized: &QuantizedTensor,
    layer: Layer<'_>,
) -> Result<(Box<dyn Compared>, Kernel), String> {
    let is_convolution = CONVOLUTIONS.contains(&layer.kind);
    if !is_convolution && layer.kind != LINEAR {
        return Err(OTHER_KERNEL.into());
    }
    if layer.dtype != FloatDType::F32 {
        let dtype = layer.dtype;
        return Err(format!(
            "kernels multiply F32, and its values are {dtype:?}"
        ));
    }
    let Some(factors) = layer.factors else {
        return Err("it carries no quantizer, by which `forward_q` finds a kernel".into());
    };
    let (product, bytes): (Box<dyn Compared>, usize) = match is_convolution {
        true => {
            let convolution = Convolution::of(device, quantized, factors)?;
            let bytes = convolution.bytes();
            (Box::new(convolution), bytes)
        }
        false => {
            let packed = Packed::new(quantized, factors)?;
            let bytes = packed.bytes();
            let values = quantized.dequantize::<2>(device);
            let product = Product {
                codes: Codes::Kernel(Box::new(packed)),
                values: values.map_err(|error| error.to_string())?,
                factors,
            };
            (Box::new(product), bytes)
        }
    };
    let kernel = Kernel {
        bytes,
        is_integer: factors != Factors::Floats,
    };
    Ok((product, kernel))
}

#[cfg(not(feature = "kernels"))]
fn of_kernel(
    _: &Device,
    _: &QuantizedTensor,
    layer: Layer<'_>,
) -> Result<(Box<dyn Compared>, Kernel), String> {
    Err(match layer.kind == LINEAR || CONVOLUTIONS.contains(&layer.kind) {
        true => "no kernel is compiled in: feature `engine` of `burn-lean`, `kernels` of `burn-lean-quant`"
            .into(),
        false => OTHER_KERNEL.into(),
    })
}

fn numbers_of<const D: usize>(multiply: impl FnOnce() -> Tensor<D>) -> Result<Vec<f32>, String> {
    let outputs = catch_quietly(|| read(multiply()));
    outputs?.map_err(|error| error.to_string())
}

/// What Burn's modules call a linear layer.
const LINEAR: &str = "Struct:Linear";

/// And the convolutions that kernels know.
const CONVOLUTIONS: [&str; 2] = ["Struct:Conv1d", "Struct:Conv2d"];

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{NumberFormat, Scheme};

    fn of_kind(kind: &str) -> Layer<'_> {
        Layer {
            kind,
            dtype: FloatDType::F32,
            factors: None,
        }
    }

    fn quantized() -> QuantizedTensor {
        let scheme = Scheme::symmetric(NumberFormat::int8().narrow());
        let codes = (0..96 * 10).map(|i| (i * 37) % 255 - 127).collect();
        QuantizedTensor::new(codes, vec![96, 10], vec![0.01], vec![0.0], scheme).unwrap()
    }

    #[test]
    fn a_product_of_other_numbers_is_found_in_every_row_of_the_weight() {
        let device = Device::flex();
        let quantized = quantized();
        let values = quantized.dequantize::<2>(&device).unwrap();
        let product = |stored: Tensor<2>| Product {
            codes: Codes::Device(Box::new(stored)),
            values: values.clone(),
            factors: Factors::Floats,
        };
        assert_eq!(product(values.clone()).check(), Ok(()));
        for input in 0..96 {
            let row = values.clone().slice([input..input + 1]) * 1.5;
            let wrong = values.clone().slice_assign([input..input + 1, 0..10], row);
            let reason = product(wrong).check().unwrap_err();
            assert!(reason.contains("is off by"), "{reason}");
        }
        let nan = values
            .clone()
            .mask_fill(values.clone().equal_elem(0.0), f32::NAN);
        assert!(product(nan).check().is_err());
    }

    #[test]
    fn what_is_no_linear_layer_has_no_such_product() {
        let device = Device::flex();
        let quantized = quantized();
        let stored = quantized.to_burn::<2>(&device).unwrap();
        let of = |kind| Product::of(&stored, &quantized, of_kind(kind));
        assert!(of("Struct:Linear").is_ok());
        let reason = of("Struct:Embedding").unwrap_err();
        assert!(reason.contains("linear layers alone"), "{reason}");
    }

    #[test]
    fn a_device_that_multiplies_the_floats_of_codes_is_not_looked_at_at_every_use() {
        let device = Device::flex();
        let quantized = quantized();
        let codes: Vec<i32> = quantized
            .codes()
            .iter()
            .map(|code| i32::from(*code / 2))
            .collect();
        let scheme = quantized.scheme().clone();
        let other =
            QuantizedTensor::new(codes, vec![96, 10], vec![0.01], vec![0.0], scheme).unwrap();
        let stored = other.to_burn::<2>(&device).unwrap();
        let product = Product::of(&stored, &quantized, of_kind(LINEAR)).unwrap();
        let reason = product.check().unwrap_err();
        assert!(reason.contains("is off by"), "{reason}");
        let held = Stored::Values(stored);
        let look = |asked| {
            let speeds = &mut Speeds::of(960);
            in_product(Some(&held), &quantized, of_kind(LINEAR), asked, speeds)
        };
        assert_eq!(look(Dequantize::EveryUse), Ok(Kernel::default()));
        // On a CPU a kernel would multiply, of which nothing is known here.
        assert!(look(Dequantize::InProduct).is_err());
    }
}
