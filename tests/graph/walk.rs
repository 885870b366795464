//! A walk over batches: the model's own values, replaced weights, rows of products.

use burn::module::{Module, RunningState};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::graph::{GraphError, Pass, Product, Walk};

use crate::models::{ConvNet, Decoder, Recurrent};
use crate::support::{Target, each_device, on_each, parameters, tensor, values, with_numbers};

/// Relative error of F32 sums in another order.
pub(crate) const ROUNDING: f32 = 1e-5;

pub(crate) fn near(expected: &[f32], found: &[f32], what: &str) {
    let size = expected.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
    near_at(size, expected, found, what);
}

/// [`near`], of numbers of this size.
pub(crate) fn near_at(size: f32, expected: &[f32], found: &[f32], what: &str) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        let error = (expected - found).abs();
        assert!(
            error <= ROUNDING * size,
            "{what}[{index}]: {found} instead of {expected}"
        );
    }
}

/// Two layers, the second of which is also the third.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
    pub(crate) third: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        let layer = |a, b| LinearConfig::new(a, b).init(device);
        with_numbers(
            Self {
                first: layer(3, 4),
                second: layer(4, 4),
                third: layer(4, 2),
            },
            7,
        )
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        let y = self.second.forward(relu(self.second.forward(x.clone())));
        self.third.forward(relu(x + y))
    }
}

pub(crate) fn batches(device: &Device) -> Vec<Tensor<2>> {
    let sizes = [5, 5, 2];
    (0..3)
        .map(|seed| tensor(seed, [sizes[seed as usize], 3], device))
        .collect()
}

/// The rows of a product over all batches, one after the other.
pub(crate) fn all_rows<O: burn_lean::graph::Tensors>(
    step: &mut burn_lean::graph::Step<'_, O>,
    product: &Product,
    group: usize,
    chunk: usize,
) -> Tensor<2> {
    let mut rows = Vec::new();
    for batch in 0..step.batches() {
        step.rows(product, batch, Pass::Replaced, group, chunk, |x| {
            rows.push(x)
        })
        .unwrap();
    }
    Tensor::cat(rows, 0)
}

fn same_as_own(target: &Target, folder: Option<&std::path::Path>) {
    let model = Net::new(&target.device);
    let walk = Walk::record(&model, batches(&target.device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    if let Some(folder) = folder {
        walk = walk.spilling_to(folder).unwrap();
    }
    let mut stops = Vec::new();
    while let Some(step) = walk
        .advance(|node| node.parameters().next().is_some())
        .unwrap()
    {
        stops.push(step.node().module().to_string());
    }
    stops.dedup();
    assert_eq!(stops, ["first", "second", "third"]);
    for (batch, x) in batches(&target.device).into_iter().enumerate() {
        let result = walk.result(batch, Pass::Replaced).unwrap();
        near(&values(model.forward(x)), &values(result), "the result");
    }
}

#[test]
fn the_model_s_own_values_for_batches_of_any_size() {
    each_device(|target| same_as_own(target, None));
}

#[test]
fn the_same_from_files() {
    let folder = tempfile::tempdir().unwrap();
    each_device(|target| same_as_own(target, Some(folder.path())));
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "files are left"
    );
}

#[test]
fn files_hold_what_memory_would() {
    let device = Device::flex();
    let model = Net::new(&device);
    let folder = tempfile::tempdir().unwrap();
    let bytes = |spills: bool| {
        let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x)).unwrap();
        let mut walk = match spills {
            true => walk.spilling_to(folder.path()).unwrap(),
            false => walk,
        };
        walk.next_product().unwrap();
        walk.next_product().unwrap();
        walk.live_bytes()
    };
    // 12 rows of 4 numbers arrive at the second layer.
    assert_eq!((bytes(true), bytes(false)), (0, 12 * 4 * 4));
}

#[test]
fn files_have_no_names_and_their_folder_is_made() {
    let device = Device::flex();
    let model = Net::new(&device);
    let walk = || Walk::record(&model, batches(&device), |model, x| model.forward(x)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let spilled = folder.path().join("not/there");
    let mut walking = walk().spilling_to(&spilled).unwrap();
    walking.next_product().unwrap();
    walking.next_product().unwrap();
    assert_eq!(walking.live_bytes(), 0);
    let named = std::fs::read_dir(&spilled).unwrap().count();
    assert!(named == 0 || !cfg!(unix), "{named} files");
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let error = walk().spilling_to(file.join("folder")).unwrap_err();
    assert_matches!(error, GraphError::Spill { .. });
    assert_says!(error, file.to_str().unwrap());
}

/// A process may have few open.
#[cfg(target_os = "linux")]
#[test]
fn many_batches_are_in_few_files() {
    let device = Device::flex();
    let model = Net::new(&device);
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        // Others close theirs meanwhile.
        let paths = all.filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
        paths.filter(|path| path.starts_with(folder.path())).count()
    };
    let batches: Vec<_> = (0..100).map(|seed| tensor(seed, [2, 3], &device)).collect();
    let walk = Walk::record(&model, batches.clone(), |model, x| model.forward(x));
    let mut walk = walk.unwrap().spilling_to(folder.path()).unwrap();
    walk.next_product().unwrap();
    walk.next_product().unwrap();
    let mark = walk.mark();
    walk.next_product().unwrap();
    let files = open();
    assert!((1..=16).contains(&files), "{files} files");
    walk.rewind(&mark);
    walk.finish().unwrap();
    for (batch, x) in batches.into_iter().enumerate() {
        let result = walk.result(batch, Pass::Original).unwrap();
        near(&values(model.forward(x)), &values(result), "the result");
    }
    drop((walk, mark));
    assert_eq!(open(), 0);
}

#[test]
fn other_models_evaluate_as_they_are() {
    each_device(|target| {
        let model = with_numbers(ConvNet::new(&target.device), 4);
        let (x, _) = ConvNet::batch(&target.device);
        let walk = Walk::record(&model, [x.clone()], |model, x| model.forward(x));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(&values(model.forward(x)), &values(result), "convolutions");

        let batch = Recurrent::batch(&target.device);
        let model = with_numbers(Decoder::new(&target.device), 4);
        let walk = Walk::record(&model, [batch.clone()], |model, batch| model.loss(batch));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(
            &values(model.loss(batch.clone())),
            &values(result),
            "a decoder",
        );

        let model = with_numbers(Recurrent::new(&target.device), 4);
        let walk = Walk::record(&model, [batch.clone()], |model, batch| model.loss(batch));
        let mut walk = walk.unwrap();
        walk.finish().unwrap();
        let result = walk.result(0, Pass::Original).unwrap();
        near(&values(model.loss(batch)), &values(result), "a recurrence");
    });
}

/// The model with another weight in its third layer, or its second.
fn edited(model: &Net, path: &str, weight: &Tensor<2>) -> Net {
    let mut model = model.clone();
    let layer = match path {
        "first.weight" => &mut model.first,
        "second.weight" => &mut model.second,
        _ => &mut model.third,
    };
    layer.weight = layer.weight.clone().map(|_| weight.clone());
    model
}

#[test]
fn a_replaced_weight_changes_what_follows_and_the_original_stays_beside_it() {
    on_each(|device| {
        let model = Net::new(device);
        let other = tensor::<2>(40, [4, 4], device);
        let expected = edited(&model, "second.weight", &other);
        for spills in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let walk = Walk::record(&model, batches(device), |model, x| model.forward(x));
            let mut walk = walk.unwrap().with_original();
            if spills {
                walk = walk.spilling_to(folder.path()).unwrap();
            }
            walk.next_product().unwrap().unwrap();
            let mut step = walk.next_product().unwrap().unwrap();
            let before = step.operand::<2>(0, 0, Pass::Replaced).unwrap();
            near(
                &values(relu(model.first.forward(batches(device)[0].clone()))),
                &values(before),
                "what arrives is not changed",
            );
            step.replace("second.weight", other.clone()).unwrap();
            for (pass, model) in [(Pass::Replaced, &expected), (Pass::Original, &model)] {
                let x = relu(model.first.forward(batches(device)[2].clone()));
                let found = step.result::<2>(2, 0, pass).unwrap();
                let expected = x.matmul(model.second.weight.val());
                near(&values(expected), &values(found), "the product itself");
            }
            walk.finish().unwrap();
            for (batch, x) in batches(device).into_iter().enumerate() {
                for (pass, model) in [(Pass::Replaced, &expected), (Pass::Original, &model)] {
                    let result = walk.result(batch, pass).unwrap();
                    near(
                        &values(model.forward(x.clone())),
                        &values(result),
                        "the result",
                    );
                }
            }
            let compressed = walk.into_model(model.clone());
            assert_eq!(parameters(&compressed), parameters(&expected));
        }
    });
}

/// The first layer alone, and what follows it.
fn begins(model: &Net, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let x = relu(model.first.forward(x));
    (x, model.third.weight.val())
}

fn goes_on(model: &Net, (x, third): (Tensor<2>, Tensor<2>)) -> Tensor<2> {
    relu(model.second.forward(x)).matmul(third)
}

/// Both passes go on from what they gave; a result that depends on no input is one, too.
#[test]
fn a_walk_goes_on_after_another_one() {
    on_each(|device| {
        let model = Net::new(device);
        let first = tensor::<2>(40, [3, 4], device);
        let second = tensor::<2>(41, [4, 4], device);
        let of_first = edited(&model, "first.weight", &first);
        let of_both = edited(&of_first, "second.weight", &second);
        for (forks, spills) in [(true, false), (true, true), (false, false), (false, true)] {
            let folder = tempfile::tempdir().unwrap();
            let mut walk = Walk::record(&model, batches(device), begins).unwrap();
            if forks {
                walk = walk.with_original();
            }
            if spills {
                walk = walk.spilling_to(folder.path()).unwrap();
            }
            walk.next_product().unwrap().unwrap();
            walk.replace("first.weight", first.clone()).unwrap();
            walk.finish().unwrap();
            let (after_first, results) = walk.into_results(model.clone()).unwrap();
            assert_eq!(parameters(&after_first), parameters(&of_first));

            let kept = spills.then(|| folder.path().join("next"));
            let walk = Walk::record_after(&after_first, &results, goes_on, kept.as_deref());
            let mut walk = walk.unwrap();
            if spills {
                assert_eq!(walk.live_bytes(), 0);
            }
            drop(results);
            walk.next_product().unwrap().unwrap();
            walk.replace("second.weight", second.clone()).unwrap();
            walk.finish().unwrap();
            let (_, results) = walk.into_results(after_first).unwrap();
            assert_eq!(results.batches(), batches(device).len());
            for (pass, model) in [(Pass::Replaced, &of_both), (Pass::Original, &model)] {
                if !forks && pass == Pass::Original {
                    continue;
                }
                for (batch, x) in batches(device).into_iter().enumerate() {
                    let expected = goes_on(model, begins(model, x));
                    let found = results.get(batch, pass).unwrap();
                    near(&values(expected), &values(found), "the result");
                }
            }
        }
    });
}

#[test]
fn an_unfinished_walk_has_no_results() {
    let device = Device::flex();
    let model = Net::new(&device);
    let mut walk = Walk::record(&model, batches(&device), begins).unwrap();
    walk.next_product().unwrap();
    let refused = walk.into_results(model);
    assert_matches!(refused, Err(GraphError::Unfinished));
}

#[test]
fn without_the_original_a_replaced_weight_is_the_only_one() {
    let device = Device::flex();
    let model = Net::new(&device);
    let other = tensor::<2>(40, [4, 2], &device);
    let expected = edited(&model, "third.weight", &other);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    while let Some(mut step) = walk.next_product().unwrap() {
        let product = step.product().unwrap();
        if product.parameter.path == "third.weight" {
            step.replace_weight(&product, other.clone().transpose())
                .unwrap();
            assert_eq!(
                values(step.weight(&product, Pass::Original).unwrap().transpose()),
                values(other.clone())
            );
        }
    }
    let x = batches(&device)[1].clone();
    let result = walk.result(1, Pass::Original).unwrap();
    near(&values(expected.forward(x)), &values(result), "the result");
}

#[test]
fn back_to_a_mark_with_the_weights_of_now() {
    on_each(|device| {
        let model = Net::new(device);
        let other = tensor::<2>(40, [4, 4], device);
        let expected = edited(&model, "second.weight", &other);
        let walk = Walk::record(&model, batches(device), |model, x| model.forward(x));
        let mut walk = walk.unwrap().with_original();
        walk.next_product().unwrap().unwrap();
        walk.next_product().unwrap().unwrap();
        let mark = walk.mark();
        while let Some(mut step) = walk.next_product().unwrap() {
            if step.product().unwrap().parameter.path == "third.weight" {
                step.replace("second.weight", other.clone()).unwrap();
            }
        }
        walk.rewind(&mark);
        let step = walk.next_product().unwrap().unwrap();
        assert_eq!(step.node().module(), "second");
        walk.finish().unwrap();
        for (batch, x) in batches(device).into_iter().enumerate() {
            let result = walk.result(batch, Pass::Replaced).unwrap();
            near(&values(expected.forward(x)), &values(result), "the result");
        }
    });
}

#[test]
fn users_of_a_weight_are_what_computes_with_it_under_any_path() {
    let device = Device::flex();
    let mut model = Net::new(&device);
    let x = batches(&device);
    let users = |model: &Net, forward: fn(&Net, Tensor<2>) -> Tensor<2>| {
        let walk = Walk::record(model, x.clone(), forward).unwrap();
        let id = model.second.weight.id;
        let users = walk.graph().users(id).map(|node| node.index());
        let products = walk.products().into_iter().map(|one| one.node);
        (users.collect::<Vec<_>>(), products.collect::<Vec<_>>())
    };
    let (found, products) = users(&model, |model, x| model.forward(x));
    assert_eq!(found, &products[1..3]);
    // A lookup is one, casts and a transposition of it are none.
    let (found, products) = users(&model, |model, x| {
        let weight = model.second.weight.val();
        let row = Tensor::<1, Int>::zeros([1], &x.device());
        let taken = weight.clone().select(0, row);
        let cast = weight.cast(FloatDType::F16).cast(FloatDType::F32);
        model.first.forward(x).matmul(cast.transpose()) + taken
    });
    assert_eq!((found.len(), found.last()), (2, products.last()));

    // A clone of a parameter is the same parameter at another path.
    model.third.weight = model.second.weight.clone();
    model.third.bias = None;
    let (found, _) = users(&model, |model, x| model.forward(x));
    assert_eq!(found.len(), 3);
}

#[test]
fn a_clone_of_a_weight_is_replaced_with_it() {
    let device = Device::flex();
    let mut model = Net::new(&device);
    model.third.weight = model.second.weight.clone();
    model.third.bias = None;
    let other = tensor::<2>(40, [4, 4], &device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    let mut step = walk.next_product().unwrap().unwrap();
    step.replace("second.weight", other.clone()).unwrap();
    walk.finish().unwrap();
    let model = walk.into_model(model);
    assert_eq!(values(model.third.weight.val()), values(other));
}

#[test]
fn a_training_pass_is_refused() {
    let device = Device::flex().autodiff();
    let model = Net::new(&device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    assert_eq!(walk.unwrap_err(), GraphError::Training);
}

/// Counts its calls, in evaluation, too.
#[derive(Module, Debug)]
struct Counting {
    layer: Linear,
    calls: RunningState<Tensor<1>>,
}

#[test]
fn a_state_that_the_pass_updates_stays_as_it_is() {
    let device = Device::flex();
    let model = Counting {
        layer: Net::new(&device).first,
        calls: RunningState::new(Tensor::zeros([1], &device)),
    };
    let forward = |model: &Counting, x: Tensor<2>| {
        model.calls.update(model.calls.value() + 1.0);
        model.layer.forward(x)
    };
    let x = batches(&device);
    let expected = values(model.layer.forward(x[0].clone()));
    let mut walk = Walk::record(&model, x, forward).unwrap();
    walk.finish().unwrap();
    let found = walk.result(0, Pass::Original).unwrap();
    near(&values(found), &expected, "the layer's output");
    assert_eq!(values(model.calls.value()), [0.0]);
}

#[test]
fn batches_that_do_other_things_are_refused() {
    let device = Device::flex();
    let model = Net::new(&device);
    let refused = |says: &str, forward: fn(&Net, Tensor<2>) -> Tensor<2>| {
        let walk = Walk::record(&model, batches(&device), forward);
        let error = walk.map(|_| ()).unwrap_err();
        assert_says!(error, "batch 2", says);
    };
    refused(
        "no use of `third.weight` instead of one",
        |model, x| match x.dims()[0] {
            2 => model.first.forward(x),
            _ => model.third.forward(relu(model.first.forward(x))),
        },
    );
    // The same operations, of other values.
    refused(
        "instead of operation 4, add of ?, that reads operation 3, relu",
        |model, x| {
            let y = model.first.forward(x);
            let active = relu(y.clone());
            match y.dims()[0] {
                2 => y + active,
                _ => active + y,
            }
        },
    );
    refused("reads a constant, another one, instead of", |model, x| {
        let [one, other] = [8, 9].map(|seed| tensor::<2>(seed, [1, 4], &x.device()));
        let added = if x.dims()[0] == 2 { &one } else { &other };
        model.first.forward(x) * one.clone() + added.clone()
    });
    let none = Walk::record(&model, Vec::<Tensor<2>>::new(), |model, x| model.forward(x));
    assert_eq!(none.unwrap_err(), GraphError::NoBatch);
}

#[test]
fn values_that_do_not_fit_are_refused_with_the_path() {
    let device = Device::flex();
    let model = Net::new(&device);
    let walk = Walk::record(&model, batches(&device), |model, x| model.forward(x));
    let mut walk = walk.unwrap();
    assert_eq!(
        walk.result(0, Pass::Original).unwrap_err(),
        GraphError::Unfinished
    );
    let later = walk.products().pop().unwrap();
    let mut step = walk.next_product().unwrap().unwrap();
    let product = step.product().unwrap();
    let wrong = tensor::<2>(1, [3, 4], &device);
    let error = step.replace_weight(&product, wrong.clone()).unwrap_err();
    assert_says!(error, "first.weight");
    assert_matches!(error, GraphError::Replacement { .. });
    let error = step.row_count(&later, 0, Pass::Original).unwrap_err();
    assert_matches!(error, GraphError::NotAlive { .. });
    let error = step.replace("second.weight", wrong.clone()).unwrap_err();
    assert_says!(error, "second.weight");
    let half = step.parameter::<2>("second.weight", Pass::Original);
    let half = half.unwrap().cast(FloatDType::F16);
    let error = step.replace("second.weight", half).unwrap_err();
    assert_says!(error, "F16");
    let error = step.replace("fourth.weight", wrong).unwrap_err();
    assert_eq!(
        error,
        GraphError::Parameter {
            path: "fourth.weight".into()
        }
    );
    let error = step.operand::<3>(0, 0, Pass::Original).unwrap_err();
    assert_matches!(error, GraphError::Operand { index: 0, .. });
}
