//! Averages of models, with values.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_lean::prune::Masks;
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, QatConfig, Schedule,
    Scheme, advance, calibrate, module::Site, quantizers,
};
use burn_lean::recipe::{RecipeError, greedy_soup, uniform_soup, uniform_soup_of_records};
use burn_lean::reparam::settle;

use crate::problem::{Net, batches};
use crate::support::{each_device, parameters, values, with_numbers};

fn linear(weights: [f32; 2], device: &Device) -> Linear {
    let mut linear = LinearConfig::new(2, 1).with_bias(false).init(device);
    linear.weight = Param::from_data([[weights[0]], [weights[1]]], device);
    linear
}

#[test]
fn every_float_tensor_is_the_mean_and_the_models_stay() {
    each_device(|target| {
        let device = &target.device.clone().autodiff();
        let trained = |seed: u64| {
            // Parameters and running statistics of its own.
            let net = with_numbers(Net::new(8, device), seed + 1);
            let (x, _) = batches(seed, device).remove(0);
            net.forward(x.mul_scalar(seed as f64 + 1.0));
            net
        };
        let (first, second) = (trained(0), trained(3));
        // Path and numbers of every float tensor.
        let state = |net: &Net| {
            let net = net.valid();
            let variance = values(net.norm.running_var.value());
            let parameters = parameters(&net).into_iter();
            let parameters = parameters.map(|one| (one.path, one.values));
            parameters
                .chain([("norm.running_var".into(), variance)])
                .collect::<Vec<(String, Vec<f32>)>>()
        };
        let before = [state(&first), state(&second)];
        let soup = uniform_soup(&[first.clone(), second.clone()]).unwrap();
        let found = state(&soup);
        assert_eq!(found.len(), before[0].len());
        for ((found, a), b) in found.iter().zip(&before[0]).zip(&before[1]) {
            assert_ne!(a.1, b.1, "{}", a.0);
            let mean = |(a, b): (&f32, &f32)| ((f64::from(*a) + f64::from(*b)) / 2.0) as f32;
            let means: Vec<f32> = a.1.iter().zip(&b.1).map(mean).collect();
            assert_eq!(*found, (a.0.clone(), means));
        }
        assert_eq!([state(&first), state(&second)], before);
        // It trains on.
        let (x, _) = batches(0, device).remove(0);
        let grads = soup.forward(x).sum().backward();
        assert!(soup.head.weight.val().grad(&grads).is_some());
    });
}

/// Ranges are no weights: the soup has that of all.
#[test]
fn the_ranges_of_activations_are_those_of_all_models() {
    let device = Device::flex();
    let observer = ObserverConfig::MinMax;
    let activation = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::int8()));
    let config = QatConfig::new().with_activation(Some(activation.with_observer(observer)));
    let seen = |largest: f32| {
        let model = config.prepare(linear([1.0, 2.0], &device)).unwrap();
        let x = Tensor::<2>::from_floats([[largest, -largest]], &device);
        calibrate(model, |model| drop(model.forward_q(x.clone()))).unwrap()
    };
    let soup = uniform_soup(&[seen(1.0), seen(3.0)]).unwrap();
    let all = quantizers(&soup);
    let input = all.iter().find(|one| one.site == Site::Input).unwrap();
    let scale = input
        .quantizer
        .qparams()
        .unwrap()
        .scale
        .into_scalar::<f32>();
    assert!((scale - 3.0 / 127.5).abs() < 1e-6, "{scale}");
}

/// As those of the checkpoints of one training.
#[test]
fn quantizers_in_several_steps_of_one_schedule_are_in_that_of_the_first_model() {
    let device = Device::flex();
    let prepared = |weights: [f32; 2], quantize_from: u64| {
        let schedule = Schedule::new().with_quantize_from(quantize_from);
        let config = QatConfig::new().with_schedule(schedule);
        let config = config.with_activation(None);
        config.prepare(linear(weights, &device)).unwrap()
    };
    let first = advance(prepared([1.0, 2.0], 3));
    let later = advance(advance(prepared([3.0, 4.0], 3)));
    let steps = |model: &Linear| {
        let steps = quantizers(model).into_iter();
        steps.map(|one| one.quantizer.step()).collect::<Vec<_>>()
    };
    assert_eq!([steps(&first), steps(&later)], [[1], [2]]);
    let soup = uniform_soup(&[first.clone(), later.clone()]).unwrap();
    assert_eq!(values(soup.weight.base()), [2.0, 3.0]);
    assert_eq!(steps(&soup), [1]);
    assert_eq!([steps(&first), steps(&later)], [[1], [2]]);

    let error = uniform_soup(&[first, prepared([1.0, 2.0], 2)]).unwrap_err();
    assert_says!(error, "set_schedule");
}

/// The averages are in the states of the first model, part by part.
#[test]
fn parts_for_evaluation_stay_so_beside_others_that_train() {
    each_device(|target| {
        let device = &target.device.clone().autodiff();
        let pair = |value: f32, trains: [bool; 2]| {
            let net = linear([value, 1.0], device);
            trains.map(|trains| match trains {
                true => net.clone(),
                false => net.valid(),
            })
        };
        for trains in [[true, false], [false, true], [true, true], [false, false]] {
            let soup = uniform_soup(&[pair(1.0, trains), pair(3.0, [true, true])]).unwrap();
            let found = soup.each_ref().map(|net| net.weight.val());
            assert_eq!(
                found.each_ref().map(|weight| weight.is_require_grad()),
                trains
            );
            for weight in found {
                assert_eq!(values(weight), [2.0, 1.0]);
            }
        }
    });
}

#[test]
fn a_model_that_makes_the_soup_worse_is_left_out() {
    let device = Device::flex();
    // The best is (1, 1): scores are minus squared distances.
    let models = [
        linear([3.0, 1.0], &device),
        linear([0.0, 1.0], &device),
        linear([9.0, 9.0], &device),
        linear([1.0, 3.0], &device),
        linear([2.0, -1.0], &device),
    ];
    let score = |model: &Linear| {
        let weights = values(model.weight.val());
        Ok(-weights
            .iter()
            .map(|w| f64::from(*w - 1.0).powi(2))
            .sum::<f64>())
    };
    let soup = greedy_soup(&models, score).unwrap();
    assert_eq!(soup.scores, [-4.0, -1.0, -128.0, -4.0, -5.0]);
    // (0, 1), then (3, 1) gives (1.5, 1); (1, 3) would give 4/3, 5/3; (2, −1) 5/3, 1/3.
    assert_eq!(soup.taken, [1, 0]);
    assert_eq!(values(soup.model.weight.val()), [1.5, 1.0]);
    assert_eq!(soup.score, -0.25);
}

#[test]
fn models_that_do_not_fit_are_refused_with_the_path() {
    let device = Device::flex();
    let refused = |soup: Result<Net, RecipeError>, path: &str, reason: &str| match soup {
        Err(RecipeError::Soup {
            path: at,
            reason: said,
        }) => {
            assert_eq!(at, path);
            assert_says!(said, reason);
        }
        other => panic!("{:?}", other.map(drop)),
    };
    let net = || Net::new(8, &device);
    refused(uniform_soup(&[]), "the models", "none");
    refused(
        uniform_soup(&[net(), Net::new(9, &device)]),
        "body.weight",
        "model 1",
    );
    let masked = |text: &str| {
        let mut net = net();
        net.head.weight = net.head.weight.map(|weight| {
            let rows = Tensor::<1, burn::tensor::Int>::arange(0..8, &weight.device());
            let kept = match text {
                "even" => rows.remainder_scalar(2).equal_elem(0),
                _ => rows.remainder_scalar(2).not_equal_elem(0),
            };
            weight * kept.float().unsqueeze_dim::<2>(1)
        });
        let group = ParamGroup::from_path("head.weight");
        Masks::from_zeros(&net, &group)
            .unwrap()
            .attach(net)
            .unwrap()
    };
    let soup = uniform_soup(&[masked("even"), masked("odd")]);
    refused(soup, "head.weight.mask.kept", "no average");
    assert!(uniform_soup(&[masked("even"), masked("even")]).is_ok());
    let config = QatConfig::new().with_activation(None);
    let converted = || {
        ConvertConfig::new()
            .convert(config.prepare(net()).unwrap())
            .unwrap()
            .0
    };
    refused(
        uniform_soup(&[converted(), converted()]),
        "conv.weight",
        "quantized",
    );
    let nan = greedy_soup(&[net()], |_| Ok(f64::NAN));
    assert_matches!(nan, Err(RecipeError::Soup { .. }));
}

/// 1 and −1 are worth 1 each, their average 0 / 0.
#[test]
fn an_average_whose_score_is_no_number_is_an_error_that_names_its_models() {
    let device = Device::flex();
    let models = [linear([1.0, 1.0], &device), linear([-1.0, -1.0], &device)];
    let score = |model: &Linear| {
        let weight = f64::from(values(model.weight.val())[0]);
        Ok((weight / weight).abs())
    };
    match greedy_soup(&models, score) {
        Err(RecipeError::Soup { path, reason }) => {
            assert_eq!(path, "the average of models [0] and 1");
            assert_eq!(reason, "its score is no number");
        }
        other => panic!("{:?}", other.map(drop)),
    }
}

#[test]
fn models_in_half_precision_stay_in_it() {
    let device = Device::flex();
    let half = |number: f32| {
        let mut layer = LinearConfig::new(2, 2).init(&device);
        layer.weight = layer.weight.map(|w| (w * 0.0 + number).cast(DType::F16));
        layer.bias = layer.bias.map(|b| b.map(|b| b.cast(DType::F16)));
        layer
    };
    let soup = uniform_soup(&[half(1.0), half(2.0)]).unwrap();
    assert_eq!(soup.weight.val().dtype(), DType::F16);
    assert_eq!(soup.bias.unwrap().val().dtype(), DType::F16);
    assert_eq!(values(soup.weight.val()), [1.5; 4]);
}

#[test]
fn records_in_files_average_as_the_models_that_they_are_of() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let models = [1, 2].map(|seed| {
        let net = with_numbers(Net::new(8, &device), seed);
        // Running statistics of its own.
        net.forward(batches(seed, &device).remove(0).0);
        settle(&net);
        net
    });
    let paths = ["first.bpk", "second.bpk"].map(|name| folder.path().join(name));
    for (model, path) in models.iter().zip(&paths) {
        model.clone().into_record().save(path).unwrap();
    }
    let fresh = Net::new(8, &device);
    let before = parameters(&fresh);
    let soup = uniform_soup_of_records(&fresh, &paths).unwrap();
    let expected = uniform_soup(&models).unwrap();
    assert_eq!(parameters(&soup), parameters(&expected));
    let mean = |net: &Net| values(net.norm.running_mean.value_sync());
    assert_ne!(mean(&models[0]), mean(&models[1]));
    assert_eq!(mean(&soup), mean(&expected));
    assert_eq!(parameters(&fresh), before);
    // Of another network, and of none.
    for (model, path) in [
        (Net::new(9, &device), paths[0].clone()),
        (fresh, folder.path().join("third.bpk")),
    ] {
        let error = uniform_soup_of_records(&model, &[&path]).unwrap_err();
        assert_says!(error, path.to_str().unwrap());
    }
}

/// Burn's copies of a model share running statistics.
#[test]
fn a_soup_of_one_is_a_copy() {
    let device = Device::flex().autodiff();
    let models = [Net::new(8, &device), with_numbers(Net::new(8, &device), 5)];
    let mut scores = [1.0, 0.0, 0.0].into_iter();
    let soup = greedy_soup(&models, |_| Ok(scores.next().unwrap())).unwrap();
    assert_eq!(soup.taken, [0]);
    let statistics = |net: &Net| values(net.norm.running_mean.value_sync());
    let before = statistics(&models[0]);
    let (x, _) = batches(3, &device).remove(0);
    soup.model.forward(x);
    assert_ne!(statistics(&soup.model), before);
    assert_eq!(statistics(&models[0]), before);
}
