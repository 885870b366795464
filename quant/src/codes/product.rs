//! Whether Burn's matrix product may read the codes of a weight themselves.
//!
//! Of a quantized weight, [`linear`] hands the codes to the device's own product, where there is one: a
//! GPU reads a quarter of the bytes, and keeps no floats. Whether its numbers are right for this shape and
//! layout, and whether it is fast, differs from device to device. So it is looked at here, once for each
//! weight, before a layer depends on it.
//!
//! Right are the sums of combs: row r of 64 multiplies every 64th input from r on by 1 or −1, so that
//! each number of the weight is in exactly one sum, of few terms, which the host adds in F64. The product
//! may be as far from them as F32 sums of so many terms can be, or as the device's own product of floats is.

use std::any::Any;
use std::time::{Duration, Instant};

use burn::tensor::module::linear;
use burn::tensor::quantization::{QuantScheme, QuantValue};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_lean_reparam::catch_quietly;

use crate::codes::storage::on_host;
use crate::codes::stored::Stored;
use crate::fake::op::to_dtype;
use crate::range::observer::read;
use crate::{Dequantize, QuantizedTensor};

/// Rows of an input that products are looked at with: a device has other kernels for few.
const ROWS: [usize; 3] = [1, 8, 64];

/// Runs of which the fastest counts.
const RUNS: usize = 5;

/// A product that takes so many times as long is slower; clocks tell no more apart.
const SLOWER: f64 = 1.05;

/// Looks at the product of a weight that is held so, `None` for floats, in a layer of this kind, with
/// values of this dtype.
///
/// [`Dequantize::InProduct`] needs one that is exact and not slower, [`Dequantize::EveryUse`] without a
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
    (layer, dtype): (&str, FloatDType),
    asked: Dequantize,
) -> Result<(), String> {
    let stored = match held {
        _ if asked == Dequantize::Once => return Ok(()),
        Some(Stored::Values(stored)) => stored,
        Some(Stored::Codes(_)) => {
            return Err("its scales are not in Burn's tensor, which holds its codes alone".into());
        }
        None if asked == Dequantize::EveryUse => return Ok(()),
        None => return Err("it is not held as a quantized tensor".into()),
    };
    let is_given_floats = layer != LINEAR || multiplies_floats(stored);
    if asked == Dequantize::EveryUse && is_given_floats {
        return Ok(());
    }
    let product = Product::of(stored, quantized, (layer, dtype))?;
    product.check()?;
    match asked {
        Dequantize::InProduct => product.compare_speed(),
        _ => Ok(()),
    }
}

/// Whether the device has no other product of such a tensor than that of its floats, which were compared
/// when it was stored.
fn multiplies_floats<const D: usize>(stored: &Tensor<D>) -> bool {
    // ndarray adds and subtracts by codes of 2 bits.
    let is_ternary = |scheme: QuantScheme| scheme.value == QuantValue::Q2S;
    on_host(&stored.device())
        && !matches!(stored.dtype(), DType::QFloat(scheme) if is_ternary(scheme))
}

/// The weight of a linear layer as it is stored, `[inputs, outputs]`, and its values.
#[derive(Debug)]
pub(crate) struct Product {
    stored: Tensor<2>,
    values: Tensor<2>,
}

impl Product {
    /// Of the weight of a layer of this kind, as Burn's modules call it, with values of this dtype.
    ///
    /// # Errors
    ///
    /// Why there is no such product.
    pub(crate) fn of<const D: usize>(
        stored: &Tensor<D>,
        quantized: &QuantizedTensor,
        (layer, dtype): (&str, FloatDType),
    ) -> Result<Self, String> {
        let matrix = (stored as &dyn Any).downcast_ref::<Tensor<2>>();
        let Some(stored) = matrix.filter(|_| layer == LINEAR) else {
            return Err("Burn multiplies by codes in linear layers alone".into());
        };
        let values = quantized.dequantize::<2>(&stored.device());
        Ok(Self {
            stored: stored.clone(),
            values: to_dtype(values.map_err(|error| error.to_string())?, dtype),
        })
    }

    /// # Errors
    ///
    /// What is wrong with the product of codes on this device.
    pub(crate) fn check(&self) -> Result<(), String> {
        let [inputs, outputs] = self.values.dims();
        let step = match self.values.dtype() {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => f64::from(f32::EPSILON),
        };
        let numbers = read(self.values.clone()).map_err(|error| error.to_string())?;
        for rows in ROWS {
            let comb = Comb { rows, inputs };
            let x = comb.tensor(&self.values);
            let (sums, magnitudes) = comb.sums(&numbers, outputs);
            let floats =
                largest_difference(&self.product(x.clone(), &self.values)?, &sums, &magnitudes);
            let codes = largest_difference(&self.product(x, &self.stored)?, &sums, &magnitudes);
            // Each of the additions rounds by half a step at most, and so does each number.
            let additions = inputs.div_ceil(rows) as f64;
            let allowed = ((additions + 1.0) * step).max(4.0 * floats);
            // Not `>`: NaN is wrong, too.
            if !(codes <= allowed) {
                return Err(format!(
                    "the device's product of {rows} rows and its codes is off by {codes:.1e} of the sum of \
                     magnitudes, and by {floats:.1e} with its floats"
                ));
            }
        }
        Ok(())
    }

    /// # Errors
    ///
    /// With how many rows the product of codes is slower than that of floats, and by how much.
    pub(crate) fn compare_speed(&self) -> Result<(), String> {
        let [inputs, _] = self.values.dims();
        for rows in ROWS {
            let x = Comb { rows, inputs }.tensor(&self.values);
            let (mut floats, mut codes) = (Duration::MAX, Duration::MAX);
            // The first of each compiles.
            for run in 0..=RUNS {
                let of_floats = self.time(&x, &self.values)?;
                let of_codes = self.time(&x, &self.stored)?;
                if run > 0 {
                    (floats, codes) = (floats.min(of_floats), codes.min(of_codes));
                }
            }
            let times = codes.as_secs_f64() / floats.as_secs_f64().max(f64::MIN_POSITIVE);
            if times > SLOWER {
                return Err(format!(
                    "the device's product of {rows} rows and its codes takes {times:.1} times as long as that \
                     with its floats"
                ));
            }
        }
        Ok(())
    }

    /// The outputs of a linear layer without a bias.
    fn product(&self, x: Tensor<2>, weight: &Tensor<2>) -> Result<Vec<f32>, String> {
        let outputs = catch_quietly(|| read(linear(x, weight.clone(), None)));
        outputs?.map_err(|error| error.to_string())
    }

    fn time(&self, x: &Tensor<2>, weight: &Tensor<2>) -> Result<Duration, String> {
        let device = weight.device();
        let timed = || {
            device.sync()?;
            let start = Instant::now();
            let y = linear(x.clone(), weight.clone(), None);
            device.sync()?;
            drop(y);
            Ok(start.elapsed())
        };
        let time = catch_quietly(timed)?;
        time.map_err(|error: burn::backend::ExecutionError| error.to_string())
    }
}

/// What Burn's modules call a linear layer.
const LINEAR: &str = "Struct:Linear";

/// An input `[rows, inputs]` of which each column has one 1 or −1.
struct Comb {
    rows: usize,
    inputs: usize,
}

impl Comb {
    /// The row that multiplies this input, and by what.
    fn tooth(&self, input: usize) -> (usize, f32) {
        let mixed = (input as u32).wrapping_mul(0x9E37_79B9);
        let sign = match mixed.count_ones().is_multiple_of(2) {
            true => 1.0,
            false => -1.0,
        };
        (input % self.rows, sign)
    }

    fn tensor(&self, like: &Tensor<2>) -> Tensor<2> {
        let mut numbers = vec![0.0; self.rows * self.inputs];
        for input in 0..self.inputs {
            let (row, sign) = self.tooth(input);
            numbers[row * self.inputs + input] = sign;
        }
        let data = TensorData::new(numbers, [self.rows, self.inputs]);
        Tensor::from_data(data, (&like.device(), like.dtype()))
    }

    /// What the product with `weight` is, `[rows, outputs]`, and the sums of magnitudes.
    fn sums(&self, weight: &[f32], outputs: usize) -> (Vec<f64>, Vec<f64>) {
        let mut sums = vec![0.0; self.rows * outputs];
        let mut magnitudes = sums.clone();
        for (input, numbers) in weight.chunks(outputs).enumerate() {
            let (row, sign) = self.tooth(input);
            let of_row = row * outputs..(row + 1) * outputs;
            let sums = sums[of_row.clone()].iter_mut();
            for ((sum, magnitude), number) in sums.zip(&mut magnitudes[of_row]).zip(numbers) {
                *sum += f64::from(sign * number);
                *magnitude += f64::from(number.abs());
            }
        }
        (sums, magnitudes)
    }
}

/// The largest difference as a part of the sum of magnitudes; NaN if there is one.
fn largest_difference(found: &[f32], sums: &[f64], magnitudes: &[f64]) -> f64 {
    let differences = found.iter().zip(sums.iter().zip(magnitudes));
    differences.fold(0.0, |largest, (found, (sum, magnitude))| {
        let difference = (f64::from(*found) - sum).abs();
        let part = match difference == 0.0 {
            true => 0.0,
            false => difference / magnitude,
        };
        match part > largest || part.is_nan() {
            true => part,
            false => largest,
        }
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{NumberFormat, Scheme};

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
            stored,
            values: values.clone(),
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
        let of = |layer| Product::of(&stored, &quantized, (layer, FloatDType::F32));
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
        let held = Stored::Values(stored);
        let look = |asked| {
            let layer = (LINEAR, FloatDType::F32);
            in_product(Some(&held), &quantized, layer, asked)
        };
        assert_eq!(look(Dequantize::EveryUse), Ok(()));
        let reason = look(Dequantize::InProduct).unwrap_err();
        assert!(reason.contains("is off by"), "{reason}");
    }
}
