//! Forward passes that cast their weights, and batches of other shapes.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig1d};
use burn::tensor::{DType, Device, Tensor};
use burn_lean::oneshot::{OneShot, Preset, Target};

use crate::methods::{compressed, inputs, layer};
use crate::support::{on_each, tensor, values, with_numbers};

/// A matrix that is kept in BF16 and multiplied in F32.
#[derive(Module, Debug)]
struct Kept {
    matrix: Param<Tensor<2>>,
}

#[test]
fn targets_of_a_weight_that_is_cast_are_in_the_dtype_of_its_product() {
    let device = Device::flex();
    let matrix = tensor::<2>(3, [8, 6], &device).cast(DType::BF16);
    let model = Kept {
        matrix: Param::from_tensor(matrix),
    };
    let forward = |model: &Kept, x: Tensor<2>| x.matmul(model.matrix.val().cast(DType::F32));
    let x = tensor::<2>(1, [64, 8], &device);
    for name in ["w4a16-g8", "sparse-2:4"] {
        let preset: Preset = name.parse().unwrap();
        let expected = values(forward(&model, x.clone()));
        let done = OneShot::new(preset)
            .compress(model.clone(), [x.clone()], forward)
            .unwrap();
        assert_eq!(done.model.matrix.val().dtype(), DType::BF16, "{name}");
        let found = values(forward(&done.model, x.clone()));
        let pairs = found.iter().zip(&expected);
        let off: f32 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
        let size: f32 = expected.iter().map(|y| y * y).sum();
        let reported = done.report.layers[0].relative_error as f32;
        // Half numbers of the weights are off by 2⁻⁹ at most.
        assert!(
            (off / size - reported).abs() < 0.1 * reported + 1e-4,
            "{name}"
        );
    }
}

/// A condition for each example, added to all of its rows.
#[derive(Module, Debug)]
struct Conditioned {
    time: Linear,
    projection: Linear,
    head: Linear,
}

#[test]
fn a_summand_that_has_as_many_rows_in_the_first_batch_alone_is_no_residual() {
    on_each(|device| {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let model = Conditioned {
            time: linear(4, 8),
            projection: linear(8, 8),
            head: linear(8, 4),
        };
        let model = with_numbers(model, 3);
        let batch = |seed: u64, length: usize| {
            let time = tensor::<3>(seed + 10, [2, 1, 4], device);
            (tensor::<3>(seed, [2, length, 8], device), time)
        };
        let done = OneShot::new(Preset::w4a16().with_group(4)).compress(
            model,
            [batch(1, 1), batch(2, 16)],
            |model, (x, time)| {
                let condition = model.time.forward(time);
                model.head.forward(model.projection.forward(x) + condition)
            },
        );
        let layers = done.unwrap().report.layers;
        assert_eq!(layers.len(), 3);
        assert!(
            layers.iter().all(|layer| layer.relative_error < 0.2),
            "{layers:?}"
        );
    });
}

/// With an even length the padding is on one side alone.
#[test]
fn patches_of_each_batch_are_cut_with_its_own_padding() {
    on_each(|device| {
        let conv: Conv1d = Conv1dConfig::new(2, 3, 3)
            .with_stride(2)
            .with_padding(PaddingConfig1d::Same)
            .with_bias(false)
            .init(device);
        let conv = with_numbers(conv, 3);
        let batches = [16, 17].map(|length| tensor::<3>(length as u64, [8, 2, length], device));
        let done = OneShot::new(Preset::w4a16().with_group(6))
            .compress(conv.clone(), batches.clone(), Conv1d::forward)
            .unwrap();
        assert_eq!(done.report.rows, 8 * 8 + 8 * 9);
        let (mut off, mut size) = (0.0, 0.0);
        for x in batches {
            let expected = values(conv.forward(x.clone()));
            let found = values(done.model.forward(x));
            let pairs = found.iter().zip(&expected);
            off += pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            size += expected.iter().map(|y| f64::from(*y).powi(2)).sum::<f64>();
        }
        let reported = done.report.layers[0].relative_error;
        assert!(
            (off / size - reported).abs() < 1e-3 * reported,
            "{reported}"
        );
    });
}

/// Rows of short batches are summed up together.
#[test]
fn many_short_batches_are_one_long_one() {
    let device = Device::flex();
    let preset = || {
        let mut preset = Preset::w4a16().with_group(4);
        preset.target = Target::OwnInputs;
        preset
    };
    let whole = Tensor::cat(inputs(&device), 0);
    let [rows, _] = whole.dims();
    let short = (0..rows).map(|row| whole.clone().slice([row..row + 1]));
    let done = OneShot::new(preset())
        .compress(layer(&device), short, Linear::forward)
        .unwrap();
    let expected = compressed(&device, preset());
    assert_eq!(done.report.layers[0].rows, rows);
    assert_eq!(done.weights, expected.weights);
}
