//! Where a recorded forward pass has numbers to quantize.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{Device, Tensor};
use burn_lean::graph::{Place, Recording, Role, SiteUse, record};

use crate::models::{ConvNet, Decoder, Recurrent};
use crate::support::with_numbers;

fn named(sites: &[SiteUse], role: Role) -> Vec<String> {
    let mut names: Vec<String> = sites
        .iter()
        .filter(|one| one.site.role == role)
        .map(|one| one.site.to_string())
        .collect();
    names.dedup();
    names
}

fn sites<O>(recording: &Recording<O>) -> Vec<SiteUse> {
    recording.graph().sites()
}

#[test]
fn a_recurrence_has_a_site_for_each_weight_and_an_edge_for_each_step() {
    let device = Device::flex();
    let model = with_numbers(Recurrent::new(&device), 3);
    let batch = Recurrent::batch(&device);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let mut inputs: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for one in sites(&recording) {
        if one.site.role == Role::Input {
            assert_eq!(one.place, Place::Operand(0));
            let count = inputs.entry(one.site.path).or_default();
            count.0 += 1;
            count.1 += usize::from(one.is_zero);
        }
    }
    assert_eq!(inputs.len(), 9);
    for (path, count) in inputs {
        // Of a hidden state, the first is zeros.
        let expected = match path.as_str() {
            "head.weight" => (1, 0),
            path if path.contains("hidden_transform") => (6, 1),
            _ => (6, 0),
        };
        assert_eq!(count, expected, "{path}");
    }
}

#[test]
fn outputs_that_an_attention_multiplies_and_branches_of_sums_are_found() {
    let device = Device::flex();
    let model = with_numbers(Decoder::new(&device), 3);
    let batch = Recurrent::batch(&device);
    let recording = record(&model, &batch, |model, batch| model.loss(batch)).unwrap();
    let all = sites(&recording);
    let mut operands: Vec<String> = all
        .iter()
        .filter(|one| one.site.role == Role::Output && one.place != Place::Result)
        .map(|one| one.site.path.clone())
        .collect();
    operands.sort();
    let layers = [
        "attention.key.weight",
        "attention.query.weight",
        "attention.value.weight",
    ];
    assert_eq!(operands, layers);
    let probabilities = named(&all, Role::Probabilities);
    assert_eq!(probabilities, ["probabilities of `attention.query`"]);
    // The rotation is a sum, too, but of parts of one tensor.
    let branches = ["sum_left of `attention.output`", "sum_left of `up`"];
    assert_eq!(named(&all, Role::SumLeft), branches);
}

#[test]
fn a_training_pass_and_an_evaluation_have_the_same_sites() {
    let device = Device::flex().autodiff();
    let model = with_numbers(ConvNet::with_dropout(0.5, &device), 3);
    let found = |model: &ConvNet, device: &Device| {
        let batch = ConvNet::batch(device);
        let recording = record(model, &batch, |model, batch| model.loss(batch)).unwrap();
        let of_all = sites(&recording).into_iter();
        of_all.map(|one| one.site).collect::<Vec<_>>()
    };
    let trained = found(&model, &device);
    assert_eq!(trained, found(&model.valid(), &device.clone().inner()));
    let inputs = trained.iter().filter(|site| site.role == Role::Input);
    let paths: Vec<&str> = inputs.map(|site| site.path.as_str()).collect();
    assert_eq!(paths, ["first.weight", "second.weight", "head.weight"]);
}

#[test]
fn an_input_that_is_added_is_a_branch_and_a_mask_over_scores_is_not() {
    let device = Device::flex();
    let layer = with_numbers(LinearConfig::new(4, 4).init(&device), 3);
    let x = Tensor::<2>::ones([4, 4], &device);
    let recording = record(&layer, &x, |layer, x| layer.forward(x.clone()) + x).unwrap();
    assert_eq!(named(&sites(&recording), Role::SumLeft).len(), 1);
    assert_eq!(named(&sites(&recording), Role::SumRight).len(), 1);
    let inputs = (x.clone(), x.clone());
    let recording = record(&layer, &inputs, |layer, (x, mask)| {
        let y = layer.forward(x);
        softmax(y.clone().matmul(y.transpose()) + mask, 1)
    })
    .unwrap();
    assert_eq!(named(&sites(&recording), Role::SumLeft), [""; 0]);
    assert_eq!(named(&sites(&recording), Role::Probabilities).len(), 1);
}

#[test]
fn gates_and_differences_are_sites_and_activations_are_not() {
    let device = Device::flex();
    let model = (0..2).map(|_| LinearConfig::new(4, 4).init(&device));
    let model = with_numbers(model.collect::<Vec<_>>(), 3);
    let x = Tensor::<2>::ones([3, 4], &device);
    let recording = record(&model, &x, |model, x| {
        let (a, b) = (model[0].forward(x.clone()), model[1].forward(x));
        // An activation multiplies a tensor with what was computed from it alone.
        let a = a.clone() * sigmoid(a);
        (a.clone() * b.clone(), a - b)
    })
    .unwrap();
    let all = sites(&recording);
    for role in [
        Role::FactorLeft,
        Role::FactorRight,
        Role::DifferenceLeft,
        Role::DifferenceRight,
    ] {
        assert_eq!(named(&all, role), [format!("{role} of `1`")]);
    }
}
