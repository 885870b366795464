//! Linear layers that multiply by packed codes.

use std::sync::Arc;

use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_kernels::{CodeGrid, Epilogue, Rows};

use super::matrix::{Matrix, Packed};
use super::{Tried, UNIT, acting, codes, grids};
use crate::WeightQuantizer;
use crate::codes::product::Factors;

impl Packed {
    /// The product of rows that are rounded to these grids: one for all, or one for each. `None` where they cannot be
    /// rounded, and unless it is multiplied by integers.
    pub(super) fn of_integers(
        &self,
        x: &[f32],
        grids: &[CodeGrid],
        epilogue: &mut Epilogue,
    ) -> Option<Vec<f32>> {
        let codes = codes(x, self.shape[0], grids)?;
        self.of_codes(&codes, grids, epilogue)
    }

    /// The same of rows that are rounded already.
    pub(super) fn of_codes(
        &self,
        codes: &[i16],
        grids: &[CodeGrid],
        epilogue: &mut Epilogue,
    ) -> Option<Vec<f32>> {
        let Matrix::Integers(matrix) = &self.matrix else {
            return None;
        };
        let [inputs, outputs] = self.shape;
        let rows = codes.len() / inputs;
        let scales = match grids {
            [grid] => vec![grid.scale; rows],
            grids => grids.iter().map(|grid| grid.scale).collect(),
        };
        epilogue.replace_row_scale(Some(scales));
        let mut y = vec![0.0; rows * outputs];
        matrix.multiply(&Rows::dense(codes, inputs), epilogue, &mut y);
        epilogue.replace_row_scale(None);
        Some(y)
    }

    /// The product of rows of floats; `None` unless it is multiplied by floats.
    pub(super) fn of_floats(&self, x: &[f32], epilogue: &Epilogue) -> Option<Vec<f32>> {
        let Matrix::Floats(matrix) = &self.matrix else {
            return None;
        };
        let [inputs, outputs] = self.shape;
        let mut y = vec![0.0; x.len() / inputs * outputs];
        matrix.multiply(&Rows::dense(x, inputs), epilogue, &mut y);
        Some(y)
    }

    /// The product of rows of −1, 0 and 1.
    pub(crate) fn of_comb(&self, x: &Tensor<2>) -> Tensor<2> {
        let data = x.clone().into_data();
        let numbers = data.as_slice::<f32>().expect("combs are of F32");
        let mut epilogue = self.epilogue(None);
        let y = match &self.matrix {
            Matrix::Floats(_) => self.of_floats(numbers, &epilogue),
            Matrix::Integers(_) => self.of_integers(numbers, &[UNIT], &mut epilogue),
        };
        let y = y.expect("combs are finite");
        let data = TensorData::new(y, [x.dims()[0], self.shape[1]]);
        Tensor::from_data(data, (&x.device(), DType::F32))
    }
}

/// What was made of the weight of a layer that has these quantizers.
pub(super) fn tried(layer: &Linear, quantizers: &WeightQuantizer) -> Arc<Tried<Packed>> {
    let factors = Factors::of(quantizers.input.as_ref());
    quantizers.weight.packed(
        |tried: &Tried<Packed>| tried.factors == factors,
        || {
            let asked = (factors, 1);
            Tried::new(&layer.weight, quantizers, asked, |codes| {
                Packed::new(codes, factors)
            })
        },
    )
}

/// The output of a layer whose weight was converted so that a kernel multiplies by its codes, with its
/// quantizers; `None` where it is to be computed by Burn, from values.
pub(crate) fn linear<const D: usize>(layer: &Linear, x: &Tensor<D>) -> Option<Tensor<D>> {
    let quantizers = acting(&layer.weight, x)?;
    let tried = tried(layer, quantizers);
    let packed = tried.packed.as_ref()?;
    let mut dims = x.dims();
    if dims[D - 1] != packed.shape[0] {
        return None;
    }
    let make = |bias: Option<&[f32]>| vec![packed.epilogue(bias)];
    let bias = layer.bias.as_ref();
    let y = match &packed.matrix {
        Matrix::Floats(_) => {
            let data = quantizers.quantize_input(x.clone()).into_data();
            let x = data.as_slice::<f32>().ok()?;
            let multiply = |ends: &mut [Epilogue]| packed.of_floats(x, &ends[0]);
            tried.ends.with(bias, make, multiply)??
        }
        Matrix::Integers(_) => {
            let input = quantizers.input.as_ref()?;
            let grids = grids(&input.rounds_with(x)?, input.scheme(), &dims)?;
            let data = x.clone().into_data();
            let x = data.as_slice::<f32>().ok()?;
            let multiply = |ends: &mut [Epilogue]| packed.of_integers(x, &grids, &mut ends[0]);
            let y = tried.ends.with(bias, make, multiply)??;
            input.called();
            y
        }
    };
    dims[D - 1] = packed.shape[1];
    let y = Tensor::from_data(TensorData::new(y, dims), (&x.device(), DType::F32));
    Some(quantizers.quantize_output(y))
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::LinearConfig;
    use burn::tensor::Device;

    use super::*;
    use crate::codes::kernel::numbers;
    use crate::module::listen::listener::{Listener, listening};
    use crate::module::listen::tap::Tap;
    use crate::module::map_quantizers;
    use crate::module::walk::Site;
    use crate::range::observer::read;
    use crate::{
        ConvertConfig, Dequantize, FakeQuantizeConfig, ForwardQ, Granularity, NumberFormat,
        ObserverConfig, QatConfig, QuantParams, QuantizedForward, QuantizedTensor, Scheme,
        WeightConfig, calibrate,
    };

    fn quantized(scheme: Scheme, shape: [usize; 2], device: &Device) -> QuantizedTensor {
        let data = TensorData::new(numbers(shape[0] * shape[1], 5), shape);
        let x = Tensor::<2>::from_data(data, device) + 0.3;
        let qparams = QuantParams::of(&x, &scheme).unwrap();
        QuantizedTensor::quantize(&x, &qparams, &scheme).unwrap()
    }

    #[test]
    fn products_of_codes_are_those_of_their_values() {
        let device = Device::flex();
        let columns = || Granularity::PerChannel { axis: 1 };
        let blocks = || Granularity::PerBlock {
            extents: vec![16, 1],
        };
        let schemes = [
            Scheme::symmetric(NumberFormat::int8().narrow()),
            Scheme::symmetric(NumberFormat::int8()).with_granularity(columns()),
            Scheme::affine(NumberFormat::int8()).with_granularity(columns()),
            Scheme::affine(NumberFormat::uint8()).with_granularity(columns()),
            Scheme::symmetric(NumberFormat::int(4)).with_granularity(blocks()),
            Scheme::affine(NumberFormat::uint(4)).with_granularity(blocks()),
            Scheme::symmetric(NumberFormat::int(3)).with_granularity(columns()),
            Scheme::affine(NumberFormat::uint(2)).with_granularity(blocks()),
            Scheme::symmetric(NumberFormat::uint(6)),
        ];
        let (inputs, outputs) = (64, 37);
        for scheme in schemes {
            let quantized = quantized(scheme.clone(), [inputs, outputs], &device);
            let weight = quantized.dequantize::<2>(&device).unwrap();
            let weight = read(weight).unwrap();
            let largest = weight.iter().fold(0f32, |most, w| most.max(w.abs()));
            let bias = numbers(outputs, 9);
            for (rows, magnitude) in [(1, 1.0), (3, 300.0), (40, 30_000.0)] {
                let x = numbers(rows * inputs, 7);
                let x: Vec<f32> = x.into_iter().map(|x| x * magnitude).collect();
                let grid = CodeGrid {
                    scale: magnitude / 127.0,
                    low: -128,
                    high: 127,
                };
                let steps = codes(&x, inputs, &[grid]).unwrap();
                let rounded: Vec<f32> = steps.iter().map(|c| f32::from(*c) * grid.scale).collect();
                for factors in [Factors::Floats, Factors::Integers] {
                    let packed = Packed::new(&quantized, factors).unwrap();
                    assert!(packed.bytes() < 2 * inputs * outputs);
                    let mut ends = packed.epilogue(Some(&bias));
                    let (given, found) = match factors {
                        Factors::Floats => (&x, packed.of_floats(&x, &ends)),
                        _ => {
                            // Of one grid, and of one for each row.
                            let found = packed.of_integers(&x, &[grid], &mut ends);
                            let each = packed.of_integers(&x, &vec![grid; rows], &mut ends);
                            assert_eq!(found, each);
                            (&rounded, found)
                        }
                    };
                    let found = found.unwrap();
                    for (row, found) in found.chunks(outputs).enumerate() {
                        for (column, found) in found.iter().enumerate() {
                            let of = |input: usize| {
                                let w = f64::from(weight[input * outputs + column]);
                                f64::from(given[row * inputs + input]) * w
                            };
                            let sum: f64 = (0..inputs).map(of).sum();
                            let expected = sum + f64::from(bias[column]);
                            // Each addition rounds once, and codes of one sign are summed apart from
                            // their offset, at most twice the largest value.
                            let terms = inputs as f32 * magnitude * 3.0 * largest;
                            let allowed = 2.0 * inputs as f32 * f32::EPSILON * terms;
                            let off = (f64::from(*found) - expected).abs();
                            assert!(off <= f64::from(allowed), "{scheme} {factors:?} {off}");
                        }
                    }
                }
            }
        }
    }

    /// Of groups that do not divide it, of floats, and of no matrix.
    #[test]
    fn what_is_not_packed_says_why() {
        let device = Device::flex();
        let ragged = Granularity::PerBlock {
            extents: vec![24, 1],
        };
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(ragged);
        let ragged = quantized(scheme, [64, 4], &device);
        let floats = quantized(Scheme::symmetric(NumberFormat::E4M3), [64, 4], &device);
        let why = |quantized| Packed::new(quantized, Factors::Floats).unwrap_err();
        assert_eq!(why(&ragged), "its groups are of several sizes");
        assert_eq!(why(&floats), "kernels multiply integers, not E4M3");
    }

    /// A converted layer whose codes go into the product, whatever the speed of that.
    fn converted(weight: WeightConfig, activation: Option<FakeQuantizeConfig>) -> Linear {
        let device = Device::flex();
        let layer = LinearConfig::new(64, 37).init(&device);
        let config = QatConfig::new()
            .with_weight(weight)
            .with_activation(activation);
        let layer: Linear = config.prepare(layer).unwrap();
        let layer = match &config.activation {
            Some(_) => {
                let observe = |layer: &Linear| drop(layer.forward_q(input(40, 3)));
                calibrate(layer, observe).unwrap()
            }
            None => layer,
        };
        let (layer, _) = ConvertConfig::new().convert(layer).unwrap();
        map_quantizers(layer, |located| match located.site {
            Site::Weight => located.quantizer.with_dequantize(Dequantize::InProduct),
            _ => located.quantizer,
        })
    }

    fn input(rows: usize, seed: u32) -> Tensor<2> {
        let data = TensorData::new(numbers(rows * 64, seed), [rows, 64]);
        Tensor::from_data(data, &Device::flex())
    }

    #[test]
    fn a_converted_layer_multiplies_by_its_codes_and_gives_what_its_values_give() {
        let per_token = FakeQuantizeConfig::new(
            Scheme::symmetric(NumberFormat::int8()).with_granularity(Granularity::PerToken),
        )
        .with_observer(ObserverConfig::Memoryless);
        let layers = [
            (WeightConfig::int(8), None),
            (WeightConfig::int(4), None),
            (WeightConfig::int(8), QatConfig::new().activation),
            (WeightConfig::int(4), Some(per_token)),
        ];
        for (weight, activation) in layers {
            let layer = converted(weight, activation);
            for rows in [1, 5] {
                let x = input(rows, 11);
                let of_values = {
                    let quantizers = WeightQuantizer::of(&layer.weight).unwrap();
                    let y = layer.forward(quantizers.quantize_input(x.clone()));
                    read(quantizers.quantize_output(y)).unwrap()
                };
                let of_codes = linear(&layer, &x).expect("a kernel multiplies");
                assert_eq!(of_codes.dims(), [rows, 37]);
                let of_codes = read(of_codes).unwrap();
                for (found, expected) in of_codes.iter().zip(&of_values) {
                    // 64 products of numbers up to 1 and 1/8.
                    assert!((found - expected).abs() <= 64.0 * 64.0 / 8.0 * f32::EPSILON);
                }
                assert_eq!(read(layer.forward_q(x)).unwrap(), of_codes);
            }
            let sequences = input(6, 1).reshape([2, 3, 64]);
            assert_eq!(linear(&layer, &sequences).unwrap().dims(), [2, 3, 37]);
        }
    }

    #[test]
    fn what_a_kernel_does_not_compute_is_left_to_burn() {
        let layer = converted(WeightConfig::int(8), QatConfig::new().activation);
        let x = input(2, 1);
        assert!(linear(&layer, &x).is_some());
        let wide = Tensor::<2>::zeros([2, 65], &Device::flex());
        let none = Tensor::<2>::zeros([0, 64], &Device::flex());
        let nan = x.clone().mask_fill(x.clone().greater_elem(0.9), f32::NAN);
        for x in [wide, none, nan, x.clone().autodiff()] {
            assert!(linear(&layer, &x).is_none());
        }
        let tap = Listener::Tap(std::sync::Arc::new(std::sync::Mutex::new(Tap::default())));
        assert!(linear(&listening(&layer, &tap), &x).is_none());
        assert!(linear(&layer.valid(), &x).is_some());
        // A bias that trains has a gradient.
        let training = layer.train();
        assert!(linear(&training, &x).is_none());
        let bias = training.bias.as_ref().unwrap().val();
        let grads = training.forward_q(x.clone()).sum().backward();
        assert_eq!(read(bias.grad(&grads).unwrap()).unwrap(), [2.0; 37]);
    }

    #[test]
    fn a_recording_or_another_rounding_in_between_leaves_the_kernel_in_use() {
        let layer = converted(WeightConfig::int(8), QatConfig::new().activation);
        let x = input(2, 1);
        let run = QuantizedForward::new();
        let of_run = run.run(&layer, x.clone(), |layer, x| layer.forward_q(x));
        let of_kernel = read(linear(&layer, &x).unwrap()).unwrap();
        for (found, expected) in of_kernel.iter().zip(read(of_run.unwrap()).unwrap()) {
            assert!((found - expected).abs() <= 64.0 * 64.0 / 8.0 * f32::EPSILON);
        }
        let floats = map_quantizers(layer.clone(), |located| match located.site {
            Site::Input => located.quantizer.with_enabled(false),
            _ => located.quantizer,
        });
        let rounded = read(linear(&floats, &x).unwrap()).unwrap();
        assert_ne!(rounded, of_kernel);
        assert_eq!(read(linear(&layer, &x).unwrap()).unwrap(), of_kernel);
    }

    #[test]
    fn a_bias_that_changes_after_a_call_is_in_the_next_one() {
        let mut layer = converted(WeightConfig::int(8), QatConfig::new().activation);
        let x = input(3, 1);
        let before = read(linear(&layer, &x).unwrap()).unwrap();
        layer.bias = layer.bias.map(|bias| bias.map(|bias| bias + 1.0));
        let after = read(linear(&layer, &x).unwrap()).unwrap();
        for (before, after) in before.iter().zip(&after) {
            assert!((after - before - 1.0).abs() < 1e-5, "{before} {after}");
        }
        layer.bias = None;
        let without = read(linear(&layer, &x).unwrap()).unwrap();
        assert_ne!(without, after);
        let wanted = layer.forward(
            WeightQuantizer::of(&layer.weight)
                .unwrap()
                .quantize_input(x),
        );
        for (found, expected) in without.iter().zip(read(wanted).unwrap()) {
            assert!((found - expected).abs() <= 64.0 * 64.0 / 8.0 * f32::EPSILON);
        }
    }
}
