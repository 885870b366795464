//! Averages of models, with values.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::Masks;
use burn_lean::quant::{ConvertConfig, QatConfig};
use burn_lean::recipe::{RecipeError, greedy_soup, uniform_soup};

use crate::problem::{Net, batches};
use crate::support::{each_device, values};

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
            let net = Net::new(8, device);
            // Running statistics of its own.
            let (x, _) = batches(seed, device).remove(0);
            net.forward(x.mul_scalar(seed as f64 + 1.0));
            net
        };
        let (first, second) = (trained(0), trained(3));
        let state = |net: &Net| values(net.valid().norm.running_var.value());
        let before = [state(&first), state(&second)];
        assert_ne!(before[0], before[1]);
        let soup = uniform_soup(&[first.clone(), second.clone()]).unwrap();
        let means = before[0].iter().zip(&before[1]);
        let means: Vec<f32> = means
            .map(|(a, b)| ((f64::from(*a) + f64::from(*b)) / 2.0) as f32)
            .collect();
        assert_eq!(state(&soup), means);
        assert_eq!([state(&first), state(&second)], before);
        // It trains on.
        let (x, _) = batches(0, device).remove(0);
        let grads = soup.forward(x).sum().backward();
        assert!(soup.head.weight.val().grad(&grads).is_some());
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
            assert!(said.contains(reason), "{said}");
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
    assert!(matches!(nan, Err(RecipeError::Soup { .. })));
}
