//! A prepared and a converted model, side by side over samples.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use burn::module::Module;

use crate::codes::weights::quantized_weights;
use crate::deploy::conversion_report::{ActivationMismatch, ConversionReport, Mismatch};
use crate::module::listen::listener::{Listener, listening, lock};
use crate::module::listen::tap::Tap;
use crate::module::walk::{Site, quantizers};
use crate::{QuantError, QuantizedTensor, module::TensorOutcome};

/// Runs the prepared and the converted model over `samples` and writes into `report` by how much
/// they differ: weight codes, and the codes of quantized activations, for each layer and each
/// quantizer of the model's own, and the model's output.
///
/// Compared are the values that codes stand for, also where a product would read the codes
/// ([`Dequantize::InProduct`](crate::Dequantize::InProduct)), whose sums may round otherwise.
///
/// `forward` gets the model in its inference form, and may call it on any thread. Samples must be on
/// its device, without autodiff.
///
/// # Errors
///
/// [`QuantError::NoData`] without samples, [`QuantError::LengthMismatch`] when the models' outputs
/// or calls differ in number, as those of two different models do, and what
/// [`quantized_weights`] finds.
pub fn compare<M: Module, X, R: TensorOutcome<D>, const D: usize>(
    report: &mut ConversionReport,
    prepared: &M,
    converted: &M,
    samples: impl IntoIterator<Item = X>,
    forward: impl Fn(&M, &X) -> R,
) -> Result<(), QuantError> {
    let (tap_prepared, prepared) = tapped(prepared);
    let (tap_converted, converted) = tapped(converted);
    let weights = weight_mismatches(&prepared, &converted)?;
    let activations = owners(&prepared);
    let mut layers: BTreeMap<String, Difference> = BTreeMap::new();
    let mut output_difference = None;
    for sample in samples {
        let run = |model: &M, tap: &Mutex<Tap>| -> Result<(Vec<f32>, Calls), QuantError> {
            let output = forward(model, &sample).tensor()?;
            let data = output.try_into_data().map_err(QuantError::device)?;
            let mut calls = Calls::new();
            for call in lock(tap).take()? {
                if activations.contains_key(&call.path) {
                    calls.entry(call.path).or_default().push(call.codes);
                }
            }
            Ok((data.convert::<f32>().iter::<f32>().collect(), calls))
        };
        let (expected, of_prepared) = run(&prepared, &tap_prepared)?;
        let (found, of_converted) = run(&converted, &tap_converted)?;
        QuantError::expect_len("outputs of the two models", expected.len(), found.len())?;
        let differences = expected.iter().zip(&found).map(|(a, b)| difference(*a, *b));
        let largest = differences.fold(output_difference.unwrap_or(0.0), f32::max);
        output_difference = Some(largest);
        let none = Vec::new();
        for path in of_prepared.keys().chain(of_converted.keys()) {
            let of = |calls: &Calls| calls.get(path).map_or(0, Vec::len);
            QuantError::expect_len(
                "quantizer calls of the two models",
                of(&of_prepared),
                of(&of_converted),
            )?;
        }
        for (path, calls) in &of_prepared {
            let others = of_converted.get(path).unwrap_or(&none);
            for (a, b) in calls.iter().zip(others) {
                QuantError::expect_len("codes of the two models", a.len(), b.len())?;
                let layer = layers.entry(activations[path].clone()).or_default();
                layer.add(a, b);
            }
        }
    }
    if output_difference.is_none() {
        return Err(QuantError::NoData {
            what: "the comparison".into(),
        });
    }
    report.output_difference = output_difference;
    for weight in &mut report.weights {
        let difference = layers.remove(&weight.path);
        let difference = difference.as_ref();
        weight.mismatch = Some(Mismatch {
            weight_codes: weights.get(&weight.path).copied().unwrap_or(0),
            activation_codes: difference.map(|difference| difference.largest),
            differing: difference.map_or(0.0, Difference::fraction),
        });
    }
    report.activations = layers
        .into_iter()
        .map(|(path, difference)| ActivationMismatch {
            path,
            codes: difference.largest,
            differing: difference.fraction(),
        })
        .collect();
    Ok(())
}

/// The codes that each quantizer gave, call by call, by its path.
type Calls = BTreeMap<String, Vec<Vec<i32>>>;

/// A copy of the model, and the codes that its quantizers give from now on.
fn tapped<M: Module>(model: &M) -> (Arc<Mutex<Tap>>, M) {
    let tap = Arc::new(Mutex::new(Tap::default()));
    let model = listening(model, &Listener::Tap(tap.clone()));
    (tap, model)
}

/// The distance of two outputs; infinite where only one of them is a number.
fn difference(a: f32, b: f32) -> f32 {
    match (a - b).abs() {
        _ if a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) => 0.0,
        nan if nan.is_nan() => f32::INFINITY,
        difference => difference,
    }
}

#[derive(Default)]
struct Difference {
    largest: u32,
    differing: usize,
    compared: usize,
}

impl Difference {
    fn add(&mut self, a: &[i32], b: &[i32]) {
        for (a, b) in a.iter().zip(b) {
            self.largest = self.largest.max(a.abs_diff(*b));
            self.differing += usize::from(a != b);
        }
        self.compared += a.len();
    }

    fn fraction(&self) -> f64 {
        self.differing as f64 / self.compared.max(1) as f64
    }
}

/// The parameter that each activation quantizer belongs to, by the quantizer's path.
fn owners<M: Module>(model: &M) -> HashMap<String, String> {
    let activations = quantizers(model)
        .into_iter()
        .filter(|located| located.site != Site::Weight);
    activations
        .map(|located| {
            let owner = located.parameter.unwrap_or_else(|| located.path.clone());
            (located.path, owner)
        })
        .collect()
}

/// The largest difference of the codes of each weight.
fn weight_mismatches<M: Module>(
    prepared: &M,
    converted: &M,
) -> Result<HashMap<String, u32>, QuantError> {
    let converted: HashMap<String, QuantizedTensor> =
        quantized_weights(converted)?.into_iter().collect();
    let mut mismatches = HashMap::new();
    for (path, expected) in quantized_weights(prepared)? {
        if let Some(found) = converted.get(&path) {
            mismatches.insert(path, expected.largest_difference(found)?);
        }
    }
    Ok(mismatches)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::{Module, Param};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::{ConvertConfig, Dequantize, QatConfig, WeightQuantizer, module::map_quantizers};

    /// A layer that multiplies by codes, whatever the device says of it.
    fn multiplying_codes() -> (Linear, Linear) {
        let layer: Linear = LinearConfig::new(8, 4).init(&Device::flex());
        let prepared: Linear = QatConfig::new()
            .with_activation(None)
            .prepare(layer)
            .unwrap();
        let (converted, _) = ConvertConfig::new().convert(prepared.clone()).unwrap();
        let layer = map_quantizers(converted, |located| {
            located.quantizer.with_dequantize(Dequantize::InProduct)
        });
        (prepared, layer)
    }

    fn is_in_product(weight: &Param<Tensor<2>>) -> bool {
        let quantizer = &WeightQuantizer::of(weight).unwrap().weight;
        quantizer.dequantize() == Some(Dequantize::InProduct)
    }

    #[test]
    fn the_layer_gets_codes_and_gives_what_its_values_give() {
        let (prepared, layer) = multiplying_codes();
        assert!(is_in_product(&layer.weight));
        let x = Tensor::<2>::from_floats(
            [[1.0, -2.0, 0.5, 3.0, 0.0, 1.5, -1.0, 2.0]],
            &Device::flex(),
        );
        let expected = prepared.valid().forward(x.clone()).into_data();
        assert_eq!(layer.forward(x.clone()).into_data(), expected);
        // Whoever looks at it sees values.
        let forward = |layer: &Linear, x: &Tensor<2>| layer.forward(x.clone());
        let (_, mut report) = ConvertConfig::new().convert(prepared.clone()).unwrap();
        compare(&mut report, &prepared, &layer, [x], forward).unwrap();
        assert_eq!(report.largest_mismatch(), Some(0));
        assert!(is_in_product(&layer.valid().weight));
    }

    #[test]
    #[cfg(feature = "ndarray")]
    #[allow(deprecated)]
    fn on_another_device_it_is_dequantized_once() {
        let (_, layer) = multiplying_codes();
        assert!(is_in_product(
            &layer.clone().to_device(&Device::flex()).weight
        ));
        assert!(!is_in_product(&layer.to_device(&Device::ndarray()).weight));
    }
}
