//! Rows whose order follows from the data: the pruned network may have another one than the dense network.

use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::Tensors;
use burn_lean::prune::layerwise::{LayerwisePruned, Outputs};
use burn_lean::prune::{Budget, Effort, Pruner, Shares};

use crate::support::row_order::{Layers, WIDTH, in_place, layers, off, order, sorted};
use crate::support::{on_each, tensor};

fn input(seed: u64, device: &Device) -> Tensor<2> {
    tensor(seed, [60, WIDTH], device)
}

fn inputs(device: &Device) -> Vec<Tensor<2>> {
    (1..=4).map(|seed| input(seed, device)).collect()
}

fn pruned<I: Tensors>(
    effort: Effort,
    model: &Layers,
    batches: Vec<I>,
    forward: impl Fn(&Layers, I) -> Tensor<2>,
) -> LayerwisePruned<Layers> {
    let mut pruner = Pruner::new(Budget::Sparsity(0.25))
        .with_effort(effort)
        .with_outputs(Outputs::Values);
    pruner.shares = Shares::Magnitude;
    pruner.prune(model.clone(), forward, batches).unwrap()
}

fn own_targets(pruned: &LayerwisePruned<Layers>) -> Vec<usize> {
    let layers = pruned.report.layers.iter();
    layers.map(|layer| layer.own_targets).collect()
}

#[test]
fn behind_a_sort_by_the_data_a_layer_is_fitted_to_rows_of_its_own() {
    on_each(|device| {
        let model = layers(2, device);
        let plain = pruned(Effort::Quick, &model, inputs(device), in_place);
        let found = pruned(Effort::Quick, &model, inputs(device), sorted);
        let [least, error] = [&plain, &found].map(|one| off(&model, &one.model, input(91, device)));
        // Three batches fit, the last one judges.
        assert_eq!(own_targets(&found), [0, 3]);
        assert_eq!(own_targets(&plain), [0, 0]);
        // What the first layer is off by is not made good by the second one.
        assert!(error < 2.5 * least, "{error} {least}");
    });
}

#[test]
fn outputs_of_other_rows_neither_judge_nor_tune() {
    on_each(|device| {
        let model = layers(2, device);
        let report = pruned(Effort::Standard, &model, inputs(device), sorted).report;
        assert_eq!((report.unpaired, report.candidates.len()), (4, 1));
        assert_eq!(report.tuning_steps, 0);
        // Brought back into the order of the inputs they do.
        let unsorted = |model: &Layers, x: Tensor<2>| {
            let h = model[0].forward(x);
            let order = order(&h);
            let y = model[1].forward(h.select(0, order.clone()));
            y.select(0, order.argsort(0))
        };
        let found = pruned(Effort::Standard, &model, inputs(device), unsorted);
        assert_eq!(found.report.unpaired, 0);
        assert!(found.report.candidates.len() > 1 && found.report.tuning_steps > 0);
    });
}

#[test]
fn indices_that_are_given_keep_the_targets_of_the_dense_network() {
    on_each(|device| {
        let model = layers(2, device);
        let forward = |model: &Layers, (x, order): (Tensor<2>, Tensor<1, Int>)| {
            model[1].forward(model[0].forward(x).select(0, order))
        };
        let batches = inputs(device).into_iter().map(|x| (x.clone(), order(&x)));
        let found = pruned(Effort::Quick, &model, batches.collect(), forward);
        assert_eq!(own_targets(&found), [0, 0]);
        assert_eq!(found.report.unpaired, 0);
    });
}
