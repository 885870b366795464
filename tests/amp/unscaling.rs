//! Gradients divided by the loss scale and looked at, element by element, on every device.

use burn::module::{Module, Param, ParamId};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::amp::{AmpError, GradScaler, GradScalerConfig, LossScale, Speculative};

use crate::model::{Mlp, bits, one_gradient};
use crate::support::{each_device, values};

/// Around what one unit, one cube and all cubes of a kernel take.
const SHAPES: [[usize; 2]; 8] = [
    [1, 1],
    [1, 3],
    [5, 51],
    [1, 257],
    [33, 62],
    [41, 50],
    [300, 101],
    [1027, 2049],
];

#[derive(Module, Debug)]
struct Weight {
    weight: Param<Tensor<2>>,
}

impl Weight {
    fn new(shape: [usize; 2], device: &Device) -> Self {
        Self {
            weight: Param::initialized(
                ParamId::new(),
                Tensor::ones(shape, &device.clone().autodiff()),
            ),
        }
    }
}

/// Numbers of both signs from 2⁻²⁰ to 2²⁰, each twice as precise as F16.
fn gradient(elements: usize) -> Vec<f32> {
    let number = |i: usize| {
        let mantissa = 1.0 + (i * 7919 % 8191) as f32 / 8192.0;
        let sign = if i.is_multiple_of(3) { -1.0 } else { 1.0 };
        sign * mantissa * f32::exp2((i % 41) as f32 - 20.0)
    };
    (0..elements).map(number).collect()
}

/// The gradients of `shape`, as they lie in memory or as a view of their transpose.
fn tensor(numbers: &[f32], shape: [usize; 2], transposed: bool, device: &Device) -> Tensor<2> {
    let [rows, columns] = shape;
    if !transposed {
        return Tensor::from_data(TensorData::new(numbers.to_vec(), shape), device);
    }
    let element = |i: usize| numbers[(i % rows) * columns + i / rows];
    let numbers: Vec<f32> = (0..numbers.len()).map(element).collect();
    Tensor::<2>::from_data(TensorData::new(numbers, [columns, rows]), device).transpose()
}

fn registered(model: &Weight, gradient: Tensor<2>) -> GradientsParams {
    let mut grads = GradientsParams::new();
    grads.register::<2>(model.weight.id, gradient);
    grads
}

fn scaler(loss_scale: f32, max_norm: Option<f32>) -> GradScaler {
    let config = GradScalerConfig::new(LossScale::Static(loss_scale)).with_max_norm(max_norm);
    config.init().unwrap()
}

#[test]
fn every_element_is_divided_and_nothing_else_happens() {
    each_device(|target| {
        for shape in SHAPES {
            let numbers = gradient(shape[0] * shape[1]);
            for (transposed, scale) in [(false, 1.0), (false, 4096.0), (true, 1.0), (true, 4096.0)]
            {
                let model = Weight::new(shape, &target.device);
                let given = tensor(&numbers, shape, transposed, &target.device);
                let kept = given.clone();
                let unscaled = scaler(scale, None)
                    .unscale(&model, registered(&model, given))
                    .unwrap();

                let found = values(unscaled.gradients().get::<2>(model.weight.id).unwrap());
                let expected: Vec<f32> = numbers.iter().map(|number| number / scale).collect();
                assert_eq!(found, expected, "{shape:?}");
                // Who holds the gradients still has them.
                assert_eq!(values(kept), numbers, "{shape:?}");
            }
        }
    });
}

#[test]
fn one_element_that_is_not_finite_is_seen_wherever_it_is() {
    each_device(|target| {
        for shape in SHAPES {
            let elements = shape[0] * shape[1];
            let mut numbers = gradient(elements);
            let places = [elements - 1, 0, elements / 2];
            for place in places
                .into_iter()
                .take(if elements > 100_000 { 1 } else { 3 })
            {
                for broken in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] {
                    for (scale, max_norm) in [(1.0, None), (1024.0, None), (1024.0, Some(1e9))] {
                        let finite = std::mem::replace(&mut numbers[place], broken);
                        let model = Weight::new(shape, &target.device);
                        let given = tensor(&numbers, shape, false, &target.device);
                        let mut scaler = scaler(scale, max_norm);
                        let _ = scaler
                            .step(
                                &mut SgdConfig::new().init(),
                                0.1,
                                model.clone(),
                                registered(&model, given),
                            )
                            .unwrap();
                        numbers[place] = finite;

                        let report = scaler.report().unwrap();
                        let case = format!("{} {shape:?} {place} {broken} {scale}", target.name);
                        // The largest number is finite; its square is not, and says so in the norm.
                        let skipped = !broken.is_finite() || max_norm.is_some();
                        assert_eq!(report.skipped, skipped, "{case}");
                        let paths = report.overflow.iter().flat_map(|overflow| overflow.paths());
                        let expected = (!broken.is_finite()).then_some("weight");
                        assert_eq!(
                            paths.collect::<Vec<_>>(),
                            Vec::from_iter(expected),
                            "{case}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn the_norm_is_that_of_the_divided_gradients() {
    each_device(|target| {
        for shape in SHAPES {
            let numbers = gradient(shape[0] * shape[1]);
            let squares = numbers.iter().map(|number| f64::from(*number).powi(2));
            let expected = squares.sum::<f64>().sqrt() / 4096.0;
            for transposed in [false, true] {
                let model = Weight::new(shape, &target.device);
                let given = tensor(&numbers, shape, transposed, &target.device);
                let mut scaler = scaler(4096.0, Some((expected / 2.0) as f32));
                let model = scaler
                    .step(
                        &mut SgdConfig::new().init(),
                        1.0,
                        model.clone(),
                        registered(&model, given),
                    )
                    .unwrap();

                let norm = f64::from(scaler.report().unwrap().grad_norm.unwrap());
                // Half the relative error of a sum of squares: 2⁻²⁴ for each of the roundings that an element may
                // go through, of which the longest chain is that of a CPU, one for each element.
                let bound = expected * 0.5 * (numbers.len() as f64 + 2.0) * f64::exp2(-24.0);
                assert!(
                    (norm - expected).abs() <= bound,
                    "{shape:?}: {norm} for {expected}"
                );
                // Clipped to half, which the step of one learning rate subtracts.
                for (weight, number) in values(model.weight.val()).iter().zip(&numbers) {
                    let step = f64::from(*number) / 4096.0 / 2.0;
                    let bound =
                        (step.abs() + 1.0) * f64::exp2(-22.0) + bound / expected * step.abs();
                    assert!(
                        (f64::from(*weight) - (1.0 - step)).abs() <= bound,
                        "{} {shape:?}: {weight} for {}",
                        target.name,
                        1.0 - step
                    );
                }
            }
        }
    });
}

/// What a kernel looks at in several parts, in one, and in several again.
#[derive(Module, Debug)]
struct Weights {
    large: Param<Tensor<2>>,
    small: Param<Tensor<1>>,
    last: Param<Tensor<2>>,
}

#[test]
fn of_several_gradients_the_one_that_is_not_finite_is_named() {
    let sizes = [41 * 101, 7, 3 * 2049];
    let names = ["large", "small", "last"];
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = Weights {
            large: Param::from_tensor(Tensor::ones([41, 101], &device)),
            small: Param::from_tensor(Tensor::ones([7], &device)),
            last: Param::from_tensor(Tensor::ones([3, 2049], &device)),
        };
        let gradients = |broken: Option<(usize, usize)>| {
            let mut all = sizes.map(gradient);
            if let Some((which, at)) = broken {
                all[which][at] = f32::INFINITY;
            }
            let [large, small, last] = all;
            let mut grads = GradientsParams::new();
            let large = tensor(&large, [41, 101], false, &target.device);
            grads.register::<2>(model.large.id, large);
            let small = Tensor::<1>::from_data(TensorData::new(small, [7]), &target.device);
            grads.register::<1>(model.small.id, small);
            let last = tensor(&last, [3, 2049], true, &target.device);
            grads.register::<2>(model.last.id, last);
            grads
        };
        for (scale, max_norm) in [
            (1.0, None),
            (1024.0, None),
            (1.0, Some(1e3)),
            (8.0, Some(1e3)),
        ] {
            for (which, (name, size)) in names.into_iter().zip(sizes).enumerate() {
                for at in [0, size - 1] {
                    let mut plain = scaler(scale, max_norm);
                    let grads = gradients(Some((which, at)));
                    let mut optim = SgdConfig::new().init();
                    let _ = plain.step(&mut optim, 0.1, model.clone(), grads).unwrap();
                    let optim = SgdConfig::new().init();
                    let mut training =
                        Speculative::new(model.clone(), optim, scaler(scale, max_norm));
                    let broken = |_: &Weights, _: &mut GradScaler| Ok(gradients(Some((which, at))));
                    training.step(0.1, broken).unwrap();
                    training.settle().unwrap();
                    for report in [plain.report(), training.report()] {
                        let overflow = report.unwrap().overflow.as_ref().unwrap();
                        let paths: Vec<_> = overflow.paths().collect();
                        assert_eq!(paths, [name], "{} {scale} {max_norm:?}", target.name);
                    }
                }
            }
            // Gradients that are finite have the same norm on both ways, and give the same weights.
            let mut plain = scaler(scale, max_norm);
            let mut optim = SgdConfig::new().init();
            let stepped = plain.step(&mut optim, 0.1, model.clone(), gradients(None));
            let optim = SgdConfig::new().init();
            let mut training = Speculative::new(model.clone(), optim, scaler(scale, max_norm));
            training.step(0.1, |_, _| Ok(gradients(None))).unwrap();
            training.settle().unwrap();
            let [norm, other] = [plain.report(), training.report()]
                .map(|report| report.unwrap().grad_norm.map(f32::to_bits));
            assert_eq!((norm.is_some(), norm), (max_norm.is_some(), other));
            let weights = |model: &Weights| {
                [
                    values(model.large.val()),
                    values(model.small.val()),
                    values(model.last.val()),
                ]
            };
            assert_eq!(weights(&stepped.unwrap()), weights(training.model()));
        }
    });
}

#[test]
fn changed_gradients_are_looked_at_again_and_what_was_found_stays_found() {
    each_device(|target| {
        let inner = &target.device;
        let model = Weight::new([1, 2], inner);
        let of = |numbers: [f32; 2]| Tensor::<2>::from_data([numbers], inner);
        for (before, after, found) in [
            ([8.0, 24.0], [5.0, 7.0], false),
            ([8.0, 24.0], [5.0, f32::NAN], true),
            ([8.0, f32::INFINITY], [5.0, 7.0], true),
        ] {
            let mut scaler = scaler(8.0, None);
            let unscaled = scaler
                .unscale(&model, registered(&model, of(before)))
                .unwrap();
            let unscaled = unscaled.with_gradients(&model, |_| registered(&model, of(after)));
            let unscaled = unscaled.unwrap();
            assert_eq!(scaler.found_inf(&model, &unscaled).unwrap(), found);
            let trained = scaler.apply(&mut SgdConfig::new().init(), 1.0, model.clone(), unscaled);
            let moved = model.weight.val() - trained.unwrap().weight.val();
            let expected = if found { [0.0, 0.0] } else { after };
            assert_eq!(moved.into_data().try_to_vec::<f32>().unwrap(), expected);
            scaler.update().unwrap();
        }
        let scaler = scaler(8.0, None);
        let unscaled = scaler.unscale(&model, registered(&model, of([8.0, 8.0])));
        let none = unscaled
            .unwrap()
            .with_gradients(&model, |_| GradientsParams::new());
        assert!(matches!(none, Err(AmpError::NoGradients)));
    });
}

/// As one that a program makes on the device of the model.
#[test]
fn a_gradient_with_autodiff_is_taken_as_those_without() {
    each_device(|target| {
        let tracked = target.device.clone().autodiff();
        for max_norm in [None, Some(0.5)] {
            let stepped = |device: &Device| {
                let model = Mlp::new(1, &tracked);
                let mut grads = one_gradient(&model, &[4.0, -8.0]);
                let bias = model.second.bias.as_ref().unwrap().id;
                grads.register::<1>(bias, Tensor::ones([3], device));
                let mut scaler = scaler(4.0, max_norm);
                let optim = &mut SgdConfig::new().init();
                let model = scaler.step(optim, 0.1, model, grads).unwrap();
                assert!(model.second.bias.as_ref().unwrap().is_require_grad());
                bits(&model)
            };
            assert_eq!(stepped(&tracked), stepped(&target.device));
        }
    });
}

#[test]
fn gradients_that_a_part_of_the_model_has_no_parameter_of_are_not_stepped() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = Mlp::new(1, &device);
        let mut scaler = scaler(4096.0, None);
        let loss = model.forward(Tensor::ones([5, 6], &device)).mean();
        let grads = scaler.scale(loss).unwrap().backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let unscaled = scaler.unscale(&model.first, grads).unwrap();
        let mut optim = SgdConfig::new().init();
        let after = scaler.apply(&mut optim, 0.1, model.clone(), unscaled);
        let after = after.unwrap();
        let weights = |model: &Mlp| {
            let of = |linear: &burn::nn::Linear| values(linear.weight.val());
            [of(&model.first), of(&model.second)]
        };
        let ([first, second], [first_after, second_after]) = (weights(&model), weights(&after));
        assert_ne!(first_after, first);
        assert_eq!(second_after, second);
    });
}
