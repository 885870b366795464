//! Blocks of which the last has what is left.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, GptqConfig, Granularity, Mapping, NumberFormat,
    ObserverConfig, PtqConfig, QatConfig, QuantParams, QuantizedForward, QuantizedTensor, Rounding,
    RoundingConfig, Scheme, WeightConfig, WeightGranularity, deploy::save_compressed_tensors,
    fake::Range, fake_quantize, inspect::health, load_safetensors, quantized_weights,
    save_safetensors,
};

use crate::support::{each_device, tensor, values, with_numbers};

const SHAPE: [usize; 2] = [5, 10];
const EXTENTS: [usize; 2] = [2, 4];

fn blocks(extents: &[usize]) -> Granularity {
    Granularity::PerBlock {
        extents: extents.to_vec(),
    }
}

/// Where each group is, in order.
fn parts() -> Vec<[std::ops::Range<usize>; 2]> {
    let along = |axis: usize| {
        let starts = (0..SHAPE[axis]).step_by(EXTENTS[axis]);
        starts.map(move |start| start..(start + EXTENTS[axis]).min(SHAPE[axis]))
    };
    let rows = along(0);
    rows.flat_map(|rows| along(1).map(move |columns| [rows.clone(), columns]))
        .collect()
}

/// Each group by itself, with one scale, is the reference.
#[test]
fn a_group_that_is_cut_off_is_a_tensor_of_its_own() {
    each_device(|target| {
        for size in [1.0, 30_000.0] {
            // All above 0: what is added to a group must not be in its range.
            for shift in [0.0, 3.0] {
                let x = (tensor::<2>(5, SHAPE, &target.device) + shift) * size;
                for scheme in [
                    Scheme::symmetric(NumberFormat::int(4)),
                    Scheme::symmetric(NumberFormat::int8())
                        .with_mapping(Mapping::SymmetricNoClipping),
                    Scheme::affine(NumberFormat::uint(4)),
                    Scheme::symmetric(NumberFormat::E4M3),
                ] {
                    groups_by_themselves(&x, &scheme);
                }
            }
        }
    });
}

fn groups_by_themselves(x: &Tensor<2>, scheme: &Scheme) {
    let whole = scheme.clone().with_granularity(blocks(&EXTENTS));
    let range = Range::of(x, &whole).unwrap();
    let qparams = QuantParams::of(x, &whole).unwrap();
    let learned = QuantParams::lsq(x, &whole).unwrap();
    let y = fake_quantize(x.clone(), &qparams, &whole);
    let codes = QuantizedTensor::quantize(x, &qparams, &whole).unwrap();
    let back = codes.dequantize::<2>(&x.device()).unwrap();
    assert_eq!(values(back), values(y.clone()), "{whole}");
    let of_elements = codes.of_elements(&(0..parts().len()).collect::<Vec<_>>());
    for (group, at) in parts().into_iter().enumerate() {
        let part = x.clone().slice(at.clone());
        let alone = QuantParams::of(&part, scheme).unwrap();
        let expected = fake_quantize(part.clone(), &alone, scheme);
        assert_eq!(
            values(y.clone().slice(at.clone())),
            values(expected),
            "{whole}, {group}"
        );
        let of_part = Range::of(&part, scheme).unwrap();
        let one = |all: &Tensor<1>| values(all.clone())[group];
        assert_eq!(one(&range.min), values(of_part.min)[0], "{whole}, {group}");
        assert_eq!(one(&range.max), values(of_part.max)[0], "{whole}, {group}");
        let start = values(QuantParams::lsq(&part, scheme).unwrap().scale)[0];
        let found = one(&learned.scale);
        assert!(
            (found - start).abs() <= 1e-6 * start,
            "{whole}, {group}: {found} {start}"
        );
        for (row, column) in at[0]
            .clone()
            .flat_map(|r| at[1].clone().map(move |c| (r, c)))
        {
            assert_eq!(of_elements[row * SHAPE[1] + column], group);
        }
    }
}

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    fc1: Linear,
    fc2: Linear,
}

impl Net {
    /// 3 channels, then 18 and 10 features.
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([3, 2], [2, 2]).init(device),
            fc1: LinearConfig::new(18, 10).init(device),
            fc2: LinearConfig::new(10, 3).init(device),
        };
        with_numbers(net, 3)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv.forward(x)).flatten::<2>(1, 3);
        self.fc2.forward(relu(self.fc1.forward(x)))
    }
}

fn config() -> QatConfig {
    let weight = WeightConfig::int(4).with_granularity(WeightGranularity::PerBlock { size: 8 });
    QatConfig::new().with_weight(weight)
}

fn input(device: &Device) -> Tensor<4> {
    tensor::<4>(2, [6, 3, 4, 4], device)
}

#[test]
fn a_model_is_trained_converted_and_kept_in_files() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let net = config().prepare(Net::new(&device)).unwrap();
        let forward = QuantizedForward::new();
        let loss = forward.run(&net, input(&device), |net, x| {
            net.forward(x).square().mean()
        });
        let grads = loss.unwrap().backward();
        // 18 inputs: of the straight-through estimator, the last two have a gradient, too.
        let grad = values(net.fc1.weight.grad(&grads).unwrap());
        assert!(grad[16 * 10..].iter().any(|x| *x != 0.0));

        let net = net.valid();
        let x = input(&target.device);
        let run = |net: &Net| values(forward.run(net, x.clone(), Net::forward).unwrap());
        let expected = run(&net);
        let weights = quantized_weights(&net).unwrap();
        let groups: Vec<usize> = weights
            .iter()
            .map(|(_, weight)| weight.scale().len())
            .collect();
        // A block of a convolution has all positions of its kernel.
        assert_eq!(groups, [2, 3 * 10, 2 * 3]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("net.safetensors");
        save_safetensors(&net, &path).unwrap();
        let fresh = config().prepare(Net::new(&target.device)).unwrap();
        let loaded = load_safetensors(fresh, &path).unwrap();
        assert_eq!(run(&loaded), expected);
        // Words of a GPU need an axis that they divide.
        if !target.is_gpu() {
            let (converted, _) = ConvertConfig::new().convert(net.clone()).unwrap();
            assert_eq!(run(&converted), expected);
            let bytes = converted.into_record().into_bytes().unwrap();
            let fresh = config().prepare(Net::new(&target.device)).unwrap();
            let (fresh, _) = ConvertConfig::new().convert(calibrated(fresh, &x)).unwrap();
            let record = burn::store::ModuleRecord::from_bytes(bytes).unwrap();
            let reloaded = fresh.load_record(record);
            assert_eq!(run(&reloaded), expected);
        }
        let report = health(&net, |net| drop(run(net))).unwrap();
        assert!(report.quantizers.iter().all(|one| one.sqnr.is_finite()));
        // The layout of others has groups of one size.
        let report = save_compressed_tensors(&net, folder.path().join("other")).unwrap();
        let why = |path: &str| {
            let mut left = report.left_out.iter();
            let (_, why) = left.find(|(left, _)| left == path).unwrap();
            why.clone()
        };
        for path in ["fc1.weight", "fc2.weight"] {
            assert!(why(path).contains("smaller than the others"), "{report:?}");
        }
    });
}

fn calibrated(net: Net, x: &Tensor<4>) -> Net {
    QuantizedForward::new()
        .calibrate(net, [x.clone()], Net::forward)
        .unwrap()
}

#[test]
fn gptq_rounds_every_block_with_its_own_scale() {
    let device = Device::flex();
    let layer: Linear = with_numbers(LinearConfig::new(18, 10).init(&device), 5);
    // Inputs that depend on each other.
    let x = tensor::<2>(2, [256, 6], &device).matmul(tensor::<2>(3, [6, 18], &device))
        + tensor::<2>(4, [256, 18], &device) * 0.1;
    let error = |rounding: Rounding| {
        let config = PtqConfig::new()
            .with_quantize(config().with_activation(None))
            .with_rounding(RoundingConfig::new().with_rounding(rounding))
            .with_progress(false);
        let batches = || [x.clone()];
        let forward = |layer: &Linear, x: Tensor<2>| layer.forward(x);
        let (rounded, _) = config
            .quantize_for(layer.clone(), batches, forward)
            .unwrap();
        let weights = quantized_weights(&rounded).unwrap();
        assert_eq!(weights[0].1.scale().len(), 3 * 10);
        let off = rounded.forward(x.clone()) - layer.forward(x.clone());
        off.square().mean().into_scalar::<f32>()
    };
    let (gptq, nearest) = (
        error(Rounding::Gptq(GptqConfig::new())),
        error(Rounding::Nearest),
    );
    assert!(gptq < 0.5 * nearest, "{gptq} {nearest}");
}

/// 8 and 6 features in blocks of 5: 5 and 3, 5 and 1.
#[test]
fn activations_have_blocks_of_what_is_left() {
    each_device(|target| {
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(blocks(&[1, 5]));
        let activation =
            FakeQuantizeConfig::new(scheme.clone()).with_observer(ObserverConfig::Memoryless);
        let config = QatConfig::new()
            .with_activation(Some(activation))
            .with_outputs(true);
        let layer: Linear = LinearConfig::new(8, 6).init(&target.device);
        let layer = config.prepare(with_numbers(layer, 4)).unwrap();
        let x = tensor::<2>(1, [4, 8], &target.device);
        let rounded = |x: Tensor<2>| {
            let qparams = QuantParams::of(&x, &scheme).unwrap();
            fake_quantize(x, &qparams, &scheme)
        };
        let expected = rounded(layer.forward(rounded(x.clone())));
        assert_eq!(values(layer.forward_q(x)), values(expected));
        let none = scheme.clone().with_granularity(blocks(&[0]));
        let none = config.with_activation(Some(FakeQuantizeConfig::new(none)));
        let error = none
            .prepare(LinearConfig::new(8, 6).init(&target.device))
            .unwrap_err();
        let error = error.into_error().to_string();
        assert_says!(error, "extents is [0]");
    });
}
