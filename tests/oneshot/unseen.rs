//! Inputs that calibration never moves: nothing is known of what their weights are for.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{LayerReport, OneShot, Preset};

use crate::support::{on_each, tensor, values, with_numbers};

/// |x|, as a sum of two halves.
#[derive(Module, Debug)]
struct Magnitude {
    split: Linear,
    join: Linear,
}

impl Magnitude {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let mut model = Self {
            split: linear(1, 2),
            join: linear(2, 1),
        };
        model.split.weight = Param::from_data([[1.0, -1.0]], device);
        model.join.weight = Param::from_data([[1.0], [1.0]], device);
        model
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.join.forward(relu(self.split.forward(x)))
    }
}

#[test]
fn a_unit_that_calibration_leaves_at_zero_keeps_its_weights() {
    on_each(|device| {
        let nearest: Preset = "w8a8".parse().unwrap();
        for preset in [nearest, Preset::w4a16().with_group(2)] {
            let name = preset.name();
            let x = Tensor::<2>::from_data([[1.0], [2.0]], device);
            let done = OneShot::new(preset)
                .compress(Magnitude::new(device), [x], Magnitude::forward)
                .unwrap();
            let join = &done.report.layers[1];
            assert_eq!((join.dead_inputs, join.unseen), (1, false), "{name}");
            let y = done.model.forward(Tensor::from_data([[-3.0]], device));
            let y = values(y)[0];
            assert!((y - 3.0).abs() < 0.2, "{name}: {y}");
        }
    });
}

/// Two experts, the second of which no token is sent to.
#[derive(Module, Debug)]
struct Experts {
    first: Linear,
    second: Linear,
}

#[test]
fn an_expert_without_a_token_is_left_or_rounded_and_said() {
    let device = Device::flex();
    let linear = || LinearConfig::new(8, 8).with_bias(false).init(&device);
    let model = Experts {
        first: linear(),
        second: linear(),
    };
    let model = with_numbers(model, 3);
    let forward = |model: &Experts, x: Tensor<2>| {
        let sent = x.clone() * 0.0;
        model.first.forward(x) + model.second.forward(sent)
    };
    for name in [
        "w8a8",
        "w4a16-g4",
        "sparse-0.5",
        "sparse-2:4",
        "sparse-2:4-w4a16-g8",
    ] {
        let preset: Preset = name.parse().unwrap();
        let done = OneShot::new(preset)
            .compress(model.clone(), [tensor(5, [32, 8], &device)], forward)
            .unwrap();
        let [first, second] = &done.report.layers[..] else {
            panic!("{:?}", done.report.layers)
        };
        assert!(!first.unseen && second.unseen, "{name}");
        assert_eq!(second.dead_inputs, 8, "{name}");
        assert!(second.relative_error < 0.02, "{name}: {second:?}");
        let weight = values(done.model.second.weight.val());
        let dense = values(model.second.weight.val());
        match name.contains("w4") || name.contains("w8") {
            true => {
                assert!(second.relative_error > 0.0, "{name}");
                let off: f32 = weight
                    .iter()
                    .zip(&dense)
                    .map(|(q, w)| (q - w).powi(2))
                    .sum();
                let size: f32 = dense.iter().map(|w| w * w).sum();
                assert!(off < 0.02 * size, "{name}: {off} of {size}");
            }
            false => assert_eq!(weight, dense, "{name}"),
        }
    }
    // A state that was written before reports said it.
    let done = OneShot::new(Preset::w8a16())
        .compress(model, [tensor(5, [32, 8], &device)], forward)
        .unwrap();
    let mut older = serde_json::to_value(&done.report.layers[0]).unwrap();
    older.as_object_mut().unwrap().remove("unseen");
    let read: LayerReport = serde_json::from_value(older).unwrap();
    assert!(!read.unseen);
}

/// The other groups' ranges say nothing of one whose inputs are all zero.
#[test]
fn a_group_of_inputs_that_stay_zero_has_a_range_of_its_own() {
    let device = Device::flex();
    let model: Linear = with_numbers(LinearConfig::new(8, 4).with_bias(false).init(&device), 3);
    let mask = Tensor::<1>::from_floats([0., 0., 0., 0., 1., 1., 1., 1.], &device);
    let x = tensor::<2>(1, [32, 8], &device) * mask.unsqueeze();
    let done = OneShot::new(Preset::w4a16().with_group(4))
        .compress(model.clone(), [x], Linear::forward)
        .unwrap();
    // `[inputs, outputs]`: the first group is the first half.
    let (dense, found) = (values(model.weight.val()), values(done.model.weight.val()));
    let pairs = || dense[..16].iter().zip(&found[..16]);
    let off: f32 = pairs().map(|(w, q)| (w - q).powi(2)).sum();
    let size: f32 = pairs().map(|(w, _)| w * w).sum();
    assert!(off < 0.02 * size, "{off} of {size}");
}
