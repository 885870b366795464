//! Weights of an earlier record under the masks of now.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::Device;
use burn_lean::prune::{Masks, PruneError, Selection, rewind};

use crate::mask::{assert_zeros, dense, masks, train};
use crate::support::{on_tracked, parameters, tensor, values, with_numbers};

#[test]
fn rewinding_resets_the_survivors_and_holds_the_zeros() {
    on_tracked(|device| {
        let early = dense(&device);
        let late = train(early.clone(), &mut SgdConfig::new().init(), 3);
        let plain = early.clone().into_record();
        let masked = masks(2).attach(early.clone()).unwrap().into_record();
        for record in [plain, masked] {
            let model = masks(4).attach(late.clone()).unwrap();
            let model = rewind(model, record).unwrap();
            assert_eq!(Masks::of(&model).unwrap(), masks(4));
            let expected = masks(4).attach(early.clone()).unwrap();
            assert_eq!(parameters(&model), parameters(&expected));
            let model = train(model, &mut AdamWConfig::new().init(), 2);
            assert_zeros(&model, &masks(4));
        }
    });
}

#[test]
fn rewinding_refuses_other_records_and_models_without_masks() {
    let device = Device::flex();
    let record = dense(&device).into_record();
    let error = rewind(dense(&device), record.clone()).unwrap_err();
    assert_eq!(error.into_error(), PruneError::NoMasks);

    let other = LinearConfig::new(8, 3).init(&device).into_record();
    let model = masks(4).attach(dense(&device)).unwrap();
    let before = parameters(&model);
    let rejected = rewind(model, other).unwrap_err();
    assert_matches!(rejected.error(), PruneError::Record { .. });
    assert_eq!(parameters(rejected.value()), before);
}

/// Its record is transposed: Burn compares the shape with that of the weight, once it was used.
#[test]
fn rewinding_takes_a_layer_in_column_layout() {
    let device = Device::flex().autodiff();
    let config = LinearConfig::new(16, 8).with_layout(LinearLayout::Col);
    let early: Linear = with_numbers(config.init(&device), 1);
    let late = with_numbers(early.clone(), 2);
    let layout = Selection::of(&early, None).unwrap().layout().clone();
    let support: Vec<usize> = (0..layout.len()).step_by(3).collect();
    let masks = Masks::from_support(&layout, &support).unwrap();
    let plain = early.clone().into_record();
    let masked = masks.attach(early.clone()).unwrap().into_record();
    let expected = masks.attach(early).unwrap();
    for record in [plain, masked] {
        let layer = masks.attach(late.clone()).unwrap();
        let layer = rewind(layer, record).unwrap();
        assert_eq!(parameters(&layer), parameters(&expected));
        let rewound = values(layer.weight.val());
        assert_eq!(rewound, values(expected.weight.val()));

        let x = tensor::<2>(3, [4, 16], &device);
        let grads = (layer.forward(x) - 1.0).square().mean().backward();
        let grads = GradientsParams::from_grads(grads, &layer);
        let mut optim = SgdConfig::new().init();
        let trained = values(optim.step(0.05, layer, grads).weight.val());
        assert_ne!(trained, rewound);
        let nonzeros: Vec<usize> = (0..trained.len())
            .filter(|at| trained[*at] != 0.0)
            .collect();
        assert_eq!(nonzeros, support);
    }
}
