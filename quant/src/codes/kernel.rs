//! The weight of a linear layer as the kernels of a CPU multiply by its codes.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Tensor, TensorData};
use burn_lean_graph::hooks::is_active;
use burn_lean_kernels::{
    Blocks, CodeGrid, Epilogue, FloatMatrix, IntegerMatrix, KernelError, Rows, in_shares,
};

use crate::codes::product::Factors;
use crate::fake::qparams::is_scale;
use crate::format::groups::{Counts, Groups, Run};
use crate::module::resident::on_host;
use crate::range::observer::read;
use crate::{NumberFormat, QuantParams, QuantizedTensor, Scheme, WeightQuantizer};

/// A weight `[inputs, outputs]`, packed.
#[derive(Debug)]
pub(crate) struct Packed {
    shape: [usize; 2],
    matrix: Matrix,
    /// Of each column, where the matrix does not have them.
    scale: Option<Vec<f32>>,
}

#[derive(Debug)]
enum Matrix {
    /// Multiplied by floats.
    Floats(FloatMatrix),
    /// Multiplied by integers.
    Integers(IntegerMatrix),
}

/// Codes with a sign, and what turns them into values: `code · scale − offset`.
struct Signed {
    codes: Vec<i8>,
    bits: u8,
    /// Rows that share a scale.
    rows: usize,
    /// `[blocks, outputs]`
    scales: Vec<f32>,
    /// As many; `None` where they are all 0.
    offsets: Option<Vec<f32>>,
}

impl Signed {
    /// # Errors
    ///
    /// Why there are no such codes.
    fn of(quantized: &QuantizedTensor, [inputs, outputs]: [usize; 2]) -> Result<Self, String> {
        let scheme = quantized.scheme();
        let NumberFormat::Int { bits, signed, .. } = scheme.format else {
            return Err(format!("kernels multiply integers, not {}", scheme.format));
        };
        let shape = quantized.shape();
        let groups = Groups::new(&scheme.granularity, shape).map_err(|error| error.to_string())?;
        let counts = scheme
            .group_shape(shape)
            .map_err(|error| error.to_string())?;
        let [blocks, across] = counts[..] else {
            return Err("kernels multiply matrices".into());
        };
        if groups.are_ragged() || inputs == 0 || outputs == 0 {
            return Err("its groups are of several sizes".into());
        }
        let middle = match signed {
            true => 0,
            false => 1_i16 << (bits - 1),
        };
        let codes = quantized.codes().iter().map(|code| (code - middle) as i8);
        let wide = outputs / across;
        let of_blocks = |of_group: &dyn Fn(usize) -> f32| -> Vec<f32> {
            let block = |block: usize| {
                (0..outputs).map(move |column| of_group(block * across + column / wide))
            };
            (0..blocks).flat_map(block).collect()
        };
        let scale = quantized.scale();
        let distance = |group: usize| quantized.zero_point()[group] - f32::from(middle);
        let is_offset = (0..scale.len()).any(|group| distance(group) != 0.0);
        Ok(Self {
            codes: codes.collect(),
            bits: if bits <= 4 { 4 } else { 8 },
            rows: inputs / blocks,
            scales: of_blocks(&|group| scale[group]),
            offsets: is_offset.then(|| of_blocks(&|group| distance(group) * scale[group])),
        })
    }

    fn blocks(&self) -> Blocks<'_> {
        let blocks = Blocks::new(self.rows, &self.scales);
        match &self.offsets {
            Some(offsets) => blocks.with_offsets(offsets),
            None => blocks,
        }
    }
}

impl Packed {
    /// Of a matrix `[inputs, outputs]`.
    ///
    /// # Errors
    ///
    /// Why it cannot be.
    pub(crate) fn new(quantized: &QuantizedTensor, factors: Factors) -> Result<Self, String> {
        let [inputs, outputs] = quantized.shape()[..] else {
            return Err("kernels multiply matrices".into());
        };
        let shape = [inputs, outputs];
        let signed = Signed::of(quantized, shape)?;
        Self::of(signed, shape, factors).map_err(|error| error.to_string())
    }

    fn of(signed: Signed, shape: [usize; 2], factors: Factors) -> Result<Self, KernelError> {
        let [inputs, outputs] = shape;
        let (codes, bits) = (&signed.codes, signed.bits);
        let is_plain = signed.rows == inputs && signed.offsets.is_none();
        let (matrix, scale) = match factors {
            Factors::Floats => {
                let matrix = FloatMatrix::of_codes(codes, shape, bits, signed.blocks())?;
                (Matrix::Floats(matrix), None)
            }
            Factors::Integers if is_plain => {
                let matrix = IntegerMatrix::new(codes, inputs, outputs, bits)?;
                (Matrix::Integers(matrix), Some(signed.scales))
            }
            Factors::Integers => {
                let matrix = IntegerMatrix::in_blocks(codes, shape, bits, signed.blocks())?;
                (Matrix::Integers(matrix), None)
            }
        };
        Ok(Self {
            shape,
            matrix,
            scale,
        })
    }

    /// Bytes that it takes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let matrix = match &self.matrix {
            Matrix::Floats(matrix) => matrix.bytes(),
            Matrix::Integers(matrix) => matrix.bytes(),
        };
        matrix + 4 * self.scale.as_ref().map_or(0, Vec::len)
    }

    fn epilogue(&self, bias: Option<&[f32]>) -> Epilogue {
        let mut epilogue = Epilogue::new(self.shape[1]);
        if let Some(scale) = &self.scale {
            epilogue = epilogue.with_scale(scale);
        }
        match bias {
            Some(bias) => epilogue.with_bias(bias),
            None => epilogue,
        }
    }

    /// The product of rows that are rounded to these grids: one for all, or one for each. `None` where they cannot be
    /// rounded, and unless it is multiplied by integers.
    fn of_integers(&self, x: &[f32], grids: &[CodeGrid], bias: Option<&[f32]>) -> Option<Vec<f32>> {
        let Matrix::Integers(matrix) = &self.matrix else {
            return None;
        };
        let [inputs, outputs] = self.shape;
        let rows = x.len() / inputs;
        let codes = codes(x, inputs, grids)?;
        let scales = match grids {
            [grid] => vec![grid.scale; rows],
            grids => grids.iter().map(|grid| grid.scale).collect(),
        };
        let epilogue = self.epilogue(bias).with_row_scale(scales);
        let mut y = vec![0.0; rows * outputs];
        matrix.multiply(&Rows::dense(&codes, inputs), &epilogue, &mut y);
        Some(y)
    }

    /// The product of rows of floats; `None` unless it is multiplied by floats.
    fn of_floats(&self, x: &[f32], bias: Option<&[f32]>) -> Option<Vec<f32>> {
        let Matrix::Floats(matrix) = &self.matrix else {
            return None;
        };
        let [inputs, outputs] = self.shape;
        let mut y = vec![0.0; x.len() / inputs * outputs];
        matrix.multiply(&Rows::dense(x, inputs), &self.epilogue(bias), &mut y);
        Some(y)
    }

    /// The product of rows of −1, 0 and 1.
    pub(crate) fn of_comb(&self, x: &Tensor<2>) -> Tensor<2> {
        let data = x.clone().into_data();
        let numbers = data.as_slice::<f32>().expect("combs are of F32");
        let unit = CodeGrid {
            scale: 1.0,
            low: -1,
            high: 1,
        };
        let y = match &self.matrix {
            Matrix::Floats(_) => self.of_floats(numbers, None),
            Matrix::Integers(_) => self.of_integers(numbers, &[unit], None),
        };
        let y = y.expect("combs are finite");
        let data = TensorData::new(y, [x.dims()[0], self.shape[1]]);
        Tensor::from_data(data, (&x.device(), DType::F32))
    }
}

/// What was made of the weight of a layer, for good.
struct Tried {
    factors: Factors,
    /// `None` where it cannot be packed.
    packed: Option<Packed>,
}

impl Tried {
    fn new(weight: &Param<Tensor<2>>, quantizers: &WeightQuantizer, factors: Factors) -> Self {
        let quantized = QuantizedTensor::from_stored(weight.base(), &quantizers.weight);
        let packed = quantized.ok().map(|codes| Packed::new(&codes, factors));
        Self {
            factors,
            packed: packed.and_then(Result::ok),
        }
    }
}

/// The output of a layer whose weight was converted so that a kernel multiplies by its codes, with its
/// quantizers; `None` where it is to be computed by Burn, from values.
pub(crate) fn linear<const D: usize>(layer: &Linear, x: &Tensor<D>) -> Option<Tensor<D>> {
    // Of a chain, whose other link acts, too, nothing is in the product.
    let quantizers = layer.weight.reparameterization::<WeightQuantizer>()?;
    if !quantizers.weight.is_in_product() || is_active() || x.is_autodiff() {
        return None;
    }
    // What Burn refuses, it is to refuse here, too. Whether there is autodiff, devices do not compare.
    let device = layer.weight.lazy_device();
    let is_like = x.dtype() == DType::F32 && x.device() == device;
    let mut dims = x.dims();
    if device.is_autodiff() || !on_host(&device) || !is_like || dims.contains(&0) {
        return None;
    }
    let factors = Factors::of(quantizers.input.as_ref());
    let tried = quantizers.weight.packed(
        |tried: &Tried| tried.factors == factors,
        || Tried::new(&layer.weight, quantizers, factors),
    );
    let packed = tried.packed.as_ref()?;
    if dims[D - 1] != packed.shape[0] {
        return None;
    }
    let bias = layer.bias.as_ref().map(|bias| read(bias.val()));
    let bias = bias.transpose().ok()?;
    let y = match &packed.matrix {
        Matrix::Floats(_) => {
            let data = quantizers.quantize_input(x.clone()).into_data();
            packed.of_floats(data.as_slice::<f32>().ok()?, bias.as_deref())?
        }
        Matrix::Integers(_) => {
            let input = quantizers.input.as_ref()?;
            let grids = grids(&input.rounds_with(x)?, input.scheme(), &dims)?;
            let data = x.clone().into_data();
            let y = packed.of_integers(data.as_slice::<f32>().ok()?, &grids, bias.as_deref())?;
            input.called();
            y
        }
    };
    dims[D - 1] = packed.shape[1];
    let y = Tensor::from_data(TensorData::new(y, dims), (&x.device(), DType::F32));
    Some(quantizers.quantize_output(y))
}

/// The grid of all rows of such an input, or of each; `None` for other groups, and for what is no scale.
fn grids(qparams: &QuantParams, scheme: &Scheme, dims: &[usize]) -> Option<Vec<CodeGrid>> {
    let groups = Groups::new(&scheme.granularity, dims).ok()?;
    let is_whole = match groups.runs() {
        [] => true,
        [all] => all.counts == Counts::Elements,
        [rows, row] => {
            let of_row = Run {
                counts: Counts::Elements,
                len: *dims.last()?,
            };
            rows.counts == Counts::Groups && *row == of_row
        }
        _ => false,
    };
    if !is_whole {
        return None;
    }
    let scales = read(qparams.scale.clone()).ok()?;
    let zero_points = read(qparams.zero_point.clone()).ok()?;
    let grid = |(scale, zero_point): (f32, f32)| {
        let low = scheme.quant_min() - zero_point;
        let high = scheme.quant_max() - zero_point;
        let fits = |distance: f32| distance.fract() == 0.0 && distance.abs() <= 255.0;
        let largest = low.abs().max(high.abs()) * scale;
        let is_grid = is_scale(scale) && fits(low) && fits(high) && largest.is_finite();
        is_grid.then_some(CodeGrid {
            scale,
            low: low as i16,
            high: high as i16,
        })
    };
    scales.into_iter().zip(zero_points).map(grid).collect()
}

/// The codes of rows of `inputs` numbers; `None` where a number is not finite.
fn codes(x: &[f32], inputs: usize, grids: &[CodeGrid]) -> Option<Vec<i16>> {
    let mut codes = vec![0; x.len()];
    let are_finite = in_shares(&mut codes, inputs, |first, codes| {
        let x = &x[first * inputs..][..codes.len()];
        let [grid] = grids else {
            let rows = x.chunks(inputs).zip(codes.chunks_mut(inputs));
            let each = rows.zip(&grids[first..]);
            // All of them: no code is left as it was.
            return each.fold(true, |are_finite, ((x, codes), grid)| {
                grid.quantize(x, codes) && are_finite
            });
        };
        grid.quantize(x, codes)
    });
    are_finite.into_iter().all(|is| is).then_some(codes)
}

#[cfg(test)]
mod tests {
    use burn::module::Module;
    use burn::nn::LinearConfig;
    use burn::tensor::Device;

    use super::*;
    use crate::module::listen::listener::{Listener, listening};
    use crate::module::listen::tap::Tap;
    use crate::module::map_quantizers;
    use crate::module::walk::Site;
    use crate::{
        ConvertConfig, Dequantize, FakeQuantizeConfig, ForwardQ, Granularity, ObserverConfig,
        QatConfig, QuantizedForward, WeightConfig, calibrate,
    };

    /// Numbers from −1 to 1 without order.
    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

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
                    let (given, found) = match factors {
                        Factors::Floats => (&x, packed.of_floats(&x, Some(&bias))),
                        Factors::Integers => {
                            // Of one grid, and of one for each row.
                            let found = packed.of_integers(&x, &[grid], Some(&bias));
                            let each = packed.of_integers(&x, &vec![grid; rows], Some(&bias));
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
}
