//! Rows whose order follows from the data: the compressed model may have another one than the original model.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};
use burn_lean::graph::Tensors;
use burn_lean::oneshot::{Compressed, OneShot, OneShotError, Preset, Target};

use crate::support::row_order::{Layers, WIDTH, in_place, layers, off, order, sorted};
use crate::support::{on_each, tensor, with_numbers};

const ROWS: usize = 200;

fn input(device: &Device) -> Tensor<2> {
    tensor(1, [ROWS, WIDTH], device)
}

fn compressed<I: Tensors>(
    preset: Preset,
    model: &Layers,
    batches: Vec<I>,
    forward: impl Fn(&Layers, I) -> Tensor<2>,
) -> Compressed<Layers> {
    OneShot::new(preset)
        .compress(model.clone(), batches, forward)
        .unwrap()
}

fn preset(name: &str) -> Preset {
    name.parse().unwrap()
}

/// In how many batches the target of each layer is that of its own inputs.
fn own_targets<M: Module>(done: &Compressed<M>) -> Vec<usize> {
    let layers = done.report.layers.iter();
    layers.map(|layer| layer.own_targets).collect()
}

#[test]
fn behind_a_sort_by_the_data_a_layer_is_fitted_to_rows_of_its_own() {
    on_each(|device| {
        let model = layers(2, device);
        for name in ["w4a16-g4", "sparse-0.5"] {
            let of = |target| {
                let preset = preset(name).with_target(target);
                compressed(preset, &model, vec![input(device)], sorted)
            };
            let (own, found) = (of(Target::OwnInputs), of(Target::Original));
            let (least, error) = (
                off(&model, &own.model, input(device)),
                off(&model, &found.model, input(device)),
            );
            assert!(error < 1.2 * least, "{name}: {error} {least}");
            assert_eq!(own_targets(&found), [0, 1], "{name}");
            // Nothing is counted where the preset asks for it.
            assert_eq!(own_targets(&own), [0, 0], "{name}");
        }
    });
}

/// The second layer is fitted to the original model, as well as where nothing is sorted.
fn keeps_the_original_target<I: Tensors>(
    model: &Layers,
    batch: I,
    forward: impl Fn(&Layers, I) -> Tensor<2>,
    device: &Device,
) {
    let found = compressed(preset("sparse-0.5"), model, vec![batch], forward);
    assert_eq!(own_targets(&found), [0, 0]);
    let plain = compressed(preset("sparse-0.5"), model, vec![input(device)], in_place);
    let [found, plain] = [found, plain].map(|done| done.report.layers[1].relative_error);
    assert!((found - plain).abs() < 0.01 * plain, "{found} {plain}");
}

#[test]
fn indices_that_are_given_keep_the_target_of_the_original_model() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, (x, order): (Tensor<2>, Tensor<1, Int>)| {
            model[1].forward(model[0].forward(x).select(0, order))
        };
        let batch = (input(device), order(&input(device)));
        keeps_the_original_target(&model, batch, forward, device);
    });
}

#[test]
fn an_order_of_what_is_not_compressed_keeps_the_target_of_the_original_model() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, x: Tensor<2>| {
            let order = order(&x);
            model[1].forward(model[0].forward(x).select(0, order))
        };
        keeps_the_original_target(&model, input(device), forward, device);
    });
}

#[test]
fn batches_in_which_the_order_came_out_the_same_keep_the_target_of_the_original_model() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, (x, apart): (Tensor<2>, Tensor<2>)| {
            let h = model[0].forward(x);
            let order = order(&(h.clone().slice_dim(1, 0..1) + apart));
            model[1].forward(h.select(0, order))
        };
        let apart = Tensor::<1, Int>::arange(0..ROWS as i64, device).float();
        let apart = apart.reshape([ROWS, 1]) * 1000.0;
        let batch = (input(device), apart.clone());
        keeps_the_original_target(&model, batch, forward, device);
        let batches = vec![
            (input(device), apart.clone()),
            (input(device), apart.zeros_like()),
        ];
        let done = compressed(preset("sparse-0.5"), &model, batches, forward);
        assert_eq!(own_targets(&done), [0, 1]);
    });
}

#[test]
fn rows_that_are_back_in_their_places_have_the_target_of_the_original_model() {
    on_each(|device| {
        let model = layers(3, device);
        // An expert that chooses its tokens.
        let chosen = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let scores = h.clone().slice_dim(1, 0..1);
            let (_, places) = scores.topk_with_indices(ROWS / 2, 0);
            let places = places.squeeze_dim::<1>(1);
            let y = model[1].forward(h.clone().select(0, places.clone()));
            let h = h.select_assign(0, places, y, IndexingUpdateOp::Add);
            model[2].forward(h)
        };
        let done = compressed(preset("sparse-0.5"), &model, vec![input(device)], chosen);
        assert_eq!(own_targets(&done), [0, 1, 0]);
        // By the inverse order.
        let unsorted = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let order = order(&h);
            let y = model[1].forward(h.select(0, order.clone()));
            model[2].forward(y.select(0, order.argsort(0)))
        };
        let done = compressed(preset("sparse-0.5"), &model, vec![input(device)], unsorted);
        assert_eq!(own_targets(&done), [0, 1, 0]);
    });
}

#[test]
fn tokens_that_are_masked_stay_in_their_places() {
    on_each(|device| {
        let model = layers(3, device);
        let forward = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let (weights, experts) = model[1].forward(h.clone()).topk_with_indices(2, 1);
            let none = Tensor::<2>::zeros([ROWS, WIDTH], &h.device());
            let gates = none.scatter(1, experts, weights, IndexingUpdateOp::Add);
            model[2].forward(h * gates.slice_dim(1, 0..1))
        };
        let done = compressed(preset("sparse-0.5"), &model, vec![input(device)], forward);
        assert_eq!(own_targets(&done), [0, 0, 0]);
    });
}

#[test]
fn the_best_experts_of_each_token_in_order_are_an_order_of_the_data() {
    on_each(|device| {
        let model = layers(4, device);
        // Tokens by expert, and back.
        let dispatched = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let (_, experts) = model[1].forward(h.clone()).topk_with_indices(2, 1);
            let order: Tensor<1, Int> = experts.reshape([2 * ROWS]).argsort(0);
            let y = model[2].forward(h.select(0, order.clone() / 2));
            let y = y.select(0, order.argsort(0)).reshape([ROWS, 2, WIDTH]);
            model[3].forward(y.sum_dim(1).squeeze_dim::<2>(1))
        };
        let done = compressed(
            preset("sparse-0.5"),
            &model,
            vec![input(device)],
            dispatched,
        );
        assert_eq!(own_targets(&done), [0, 0, 1, 0]);
    });
}

#[test]
fn the_best_tokens_are_others_in_the_order_they_had_as_well() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let scores = h.clone().slice_dim(1, 0..1);
            let (_, kept) = scores.topk_with_indices(ROWS / 2, 0);
            let kept = kept.squeeze_dim::<1>(1);
            let kept = kept.clone().select(0, kept.argsort(0));
            model[1].forward(h.select(0, kept))
        };
        let done = compressed(preset("sparse-0.5"), &model, vec![input(device)], forward);
        assert_eq!(own_targets(&done), [0, 1]);
    });
}

#[test]
fn tokens_below_the_best_ones_that_are_masked_stay_in_their_places() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let scores = h.clone().slice_dim(1, 0..1);
            let least = scores.clone().topk(50, 0).slice_dim(0, 49..50);
            let mask = (scores - least).greater_equal_elem(0.0).float();
            model[1].forward(h * mask)
        };
        let done = compressed(preset("sparse-0.5"), &model, vec![input(device)], forward);
        assert_eq!(own_targets(&done), [0, 0]);
    });
}

#[test]
fn behind_experts_of_masked_tokens_a_sum_with_a_residual_is_made_good() {
    on_each(|device| {
        let model = layers(4, device);
        let last = |model: &Layers, h: Tensor<2>| h.clone() + model[3].forward(h);
        // An expert for the tokens that chose it, slot by slot.
        let slots = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let (weights, experts) = model[1].forward(h.clone()).topk_with_indices(2, 1);
            let y = model[2].forward(h.clone());
            let gate = |slot: i64| {
                let chosen = experts.clone().slice_dim(1, slot..slot + 1).equal_elem(3);
                weights.clone().slice_dim(1, slot..slot + 1) * chosen.float()
            };
            last(model, h + y.clone() * gate(0) + y * gate(1))
        };
        let scattered = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let (weights, experts) = model[1].forward(h.clone()).topk_with_indices(2, 1);
            let none = Tensor::<2>::zeros([ROWS, WIDTH], &h.device());
            let gates = none.scatter(1, experts, weights, IndexingUpdateOp::Add);
            let y = model[2].forward(h.clone());
            last(model, h + y * gates.slice_dim(1, 3..4))
        };
        let batches = || vec![input(device)];
        let found = compressed(preset("sparse-0.5"), &model, batches(), slots);
        let plain = compressed(preset("sparse-0.5"), &model, batches(), scattered);
        let [found, plain] = [found, plain].map(|done| done.report.layers[3].relative_error);
        assert!((found - plain).abs() < 0.01 * plain, "{found} {plain}");
    });
}

/// A layer, maybe of sorted rows.
#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    sorts: bool,
}

#[test]
fn the_order_of_rows_is_known_from_block_to_block() {
    let device = Device::flex();
    let block = |number: usize| -> Result<(String, Block), OneShotError> {
        let linear = with_numbers(LinearConfig::new(WIDTH, WIDTH).init(&device), number as u64);
        let sorts = number == 1;
        Ok((format!("layers.{number}"), Block { linear, sorts }))
    };
    let forward = |block: &Block, x: Tensor<2>| {
        let x = match block.sorts {
            true => x.clone().select(0, order(&x)),
            false => x,
        };
        block.linear.forward(x)
    };
    let mut found = Vec::new();
    let done = OneShot::new(preset("sparse-0.5")).compress_blocks(
        [input(&device)],
        (0..3).map(block),
        forward,
        |_, block| -> Result<(), OneShotError> {
            found.extend(own_targets(&block));
            Ok(())
        },
    );
    assert_eq!(found, [0, 1, 1]);
    let whole = done.unwrap().report.layers;
    assert_eq!(whole[2].own_targets, 1);
}

#[test]
fn indices_that_are_given_are_so_for_each_block() {
    let device = Device::flex();
    let block = |number: usize| -> Result<(String, Linear), OneShotError> {
        let linear = with_numbers(LinearConfig::new(WIDTH, WIDTH).init(&device), number as u64);
        Ok((format!("layers.{number}"), linear))
    };
    let forward = |linear: &Linear, (h, chosen): (Tensor<2>, Tensor<1, Int>)| {
        let y = h.clone().select(0, chosen.clone()).tanh();
        let h = h.select_assign(0, chosen.clone(), y, IndexingUpdateOp::Add);
        (linear.forward(h), chosen)
    };
    let chosen = order(&input(&device)).slice_dim(0, 0..50);
    let done = OneShot::new(preset("sparse-0.5")).compress_blocks(
        [(input(&device), chosen)],
        (0..3).map(block),
        forward,
        |_, _| -> Result<(), OneShotError> { Ok(()) },
    );
    let layers = done.unwrap().report.layers.into_iter();
    let found: Vec<usize> = layers.map(|layer| layer.own_targets).collect();
    assert_eq!(found, [0, 0, 0]);
}
