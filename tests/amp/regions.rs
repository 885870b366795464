//! What crosses the edges of regions, and what a model makes inside of one.

use std::collections::{BTreeMap, HashMap};

use burn::nn::{Initializer, LinearConfig};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_lean::amp::{
    Autocast, AutocastConfig, Fallback, Tensors, full_precision, tensors, to_region,
};

use crate::model::Mlp;
use crate::support::{each_device, tensor, values};

fn prepared(dtype: FloatDType, device: &Device) -> (Mlp, Autocast) {
    AutocastConfig::new(dtype)
        .with_fallback(Fallback::Emulate)
        .prepare(Mlp::new(1, &device.clone().autodiff()))
        .unwrap()
}

/// The dtype that tensors have inside of a region.
fn inside(autocast: &Autocast) -> DType {
    match autocast.is_emulated() {
        true => DType::F32,
        false => autocast.dtype().into(),
    }
}

#[test]
fn a_region_inside_of_another_returns_what_the_outer_one_computes_in() {
    each_device(|target| {
        for outer_dtype in [FloatDType::F16, FloatDType::BF16] {
            for inner_dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F32] {
                let (model, outer) = prepared(outer_dtype, &target.device);
                let (other, inner) = prepared(inner_dtype, &target.device);
                let x = tensor::<2>(3, [2, 6], &target.device.clone().autodiff());
                let y = outer.forward(x, |x| {
                    let y = inner.forward(x.clone(), |x| other.first.forward(x));
                    assert_eq!(y.dtype(), inside(&outer));
                    // Mixed dtypes panic or compute nonsense here.
                    let y = model.second.forward(y);
                    // Where nothing is half, a region returns F32 as it does outside.
                    let z = full_precision(x, |x| inner.forward(x, |x| other.first.forward(x)));
                    assert_eq!(z.dtype(), inside(&outer));
                    y + model.second.forward(z)
                });
                assert_eq!(y.dtype(), DType::F32);
                assert!(values(y.clone()).iter().all(|y| y.is_finite()));
                let grads = y.sum().backward();
                for weight in [&model.second.weight, &other.first.weight] {
                    let grad = weight.base().grad(&grads).unwrap();
                    assert_eq!(grad.dtype(), DType::F32);
                    assert!(values(grad).iter().any(|grad| *grad != 0.0));
                }
            }
        }
    });
}

#[test]
fn a_run_inside_of_a_region_is_that_outside_of_it() {
    each_device(|target| {
        let (model, autocast) = prepared(FloatDType::BF16, &target.device);
        let device = target.device.clone().autodiff();
        let x = tensor::<2>(3, [2, 6], &device);
        let run = || {
            let x = x.clone();
            let explained = autocast.explain(&model, x.clone(), |model, x| model.forward(x));
            let y = autocast.run(&model, x, |model, x| model.forward(x));
            (values(y.unwrap()), explained.unwrap())
        };
        let mut inside = None;
        autocast.forward((), |()| inside = Some(run()));
        assert_eq!(inside, Some(run()));
        let full = Autocast::new(FloatDType::F32);
        let run = || {
            let y = full.run(&model, x.clone(), |model, x| model.forward(x));
            values(y.unwrap())
        };
        let mut inside = Vec::new();
        autocast.forward((), |()| inside = run());
        assert_eq!(inside, run());

        // 90,000 is on no grid of half precision.
        let large = Initializer::Constant { value: 300.0 };
        let config = LinearConfig::new(1, 1).with_bias(false);
        let model = config.with_initializer(large).init(&device);
        let x = Tensor::<2>::full([1, 1], 300.0, &device);
        let run = || {
            let y = autocast.run(&model, x.clone(), |model, x| {
                full_precision(x, |x| model.forward(x) - 89_999.0)
            });
            values(y.unwrap())
        };
        let mut inside = Vec::new();
        autocast.forward((), |()| inside = run());
        assert_eq!(inside, [1.0]);
        assert_eq!(run(), [1.0]);
    });
}

#[test]
fn a_run_inside_of_another_is_a_part_of_it() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = Mlp::new(1, &device);
        let x = tensor::<2>(3, [2, 6], &device);
        let autocast = |dtype| Autocast::new(dtype).with_fallback(Fallback::Emulate);
        let (outer, inner) = (autocast(FloatDType::BF16), autocast(FloatDType::F16));
        let found = outer.run(&model, x.clone(), |model, x| {
            inner.run(model, x, |model, x| model.forward(x)).unwrap()
        });
        let expected = outer.run(&model, x, |model, x| model.forward(x));
        assert_eq!(values(found.unwrap()), values(expected.unwrap()));
    });
}

#[test]
fn what_leaves_an_emulated_region_into_another_is_on_the_grids_of_both() {
    each_device(|target| {
        let (_, bf16) = prepared(FloatDType::BF16, &target.device);
        let (_, f16) = prepared(FloatDType::F16, &target.device);
        let x = Tensor::<1>::full([1], 1.00390625 * 1.0009765625, &target.device);
        let y = f16.forward(x, |x| {
            bf16.forward(x, |x| {
                x.mul_scalar(1.0) + to_region(Tensor::ones([1], &target.device))
            })
        });
        assert_eq!(values(y), [2.0]);
    });
}

#[test]
fn a_model_casts_its_own_constants_to_the_region() {
    each_device(|target| {
        for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            let (model, autocast) = prepared(dtype, &target.device);
            let x = tensor::<2>(3, [2, 6], &target.device);
            let constant = || Tensor::<2>::full([1, 8], 0.1, &target.device);
            let y = autocast.forward(x, |x| {
                assert_eq!(x.dtype(), inside(&autocast));
                full_precision((), |()| {
                    assert_eq!(to_region(constant()).dtype(), DType::F32);
                });
                let own = to_region(constant());
                assert_eq!(own.dtype(), inside(&autocast));
                model.second.forward(model.first.forward(x) + own)
            });
            assert_eq!(y.dtype(), DType::F32);
            assert_eq!(values(to_region(constant())), values(constant()));
        }
    });
}

#[derive(Debug, Clone)]
struct Boxes {
    corners: Vec<Tensor<2>>,
    scale: f64,
}
tensors!(Boxes { corners; scale });

#[derive(Debug)]
struct Sample {
    image: Tensor<2>,
    boxes: Option<Boxes>,
    label: Tensor<1, Int>,
}
tensors!(Sample {
    image,
    boxes,
    label
});

#[derive(Debug)]
struct Pair(Tensor<1>, Tensor<1>);
tensors!(Pair { 0, 1 });

#[test]
fn containers_and_own_structs_cross_the_edges() {
    each_device(|target| {
        let (_, autocast) = prepared(FloatDType::F16, &target.device);
        let device = &target.device;
        let vector = || Tensor::<1>::ones([2], device);
        let dtype = inside(&autocast);

        let input: Result<Box<Tensor<1>>, String> = Ok(Box::new(vector()));
        let output = autocast.forward(input, |input| {
            assert_eq!(input.as_ref().unwrap().dtype(), dtype);
            input
        });
        assert_eq!(output.unwrap().dtype(), DType::F32);
        let error: Result<Tensor<1>, String> = autocast.forward((), |()| Err("no".into()));
        assert_eq!(error.unwrap_err(), "no");

        let by_name = HashMap::from([("a".to_string(), vector())]);
        let by_level = BTreeMap::from([(1, vector()), (2, vector())]);
        let (by_name, by_level) = autocast.forward((by_name, by_level), |(by_name, by_level)| {
            assert_eq!(by_name["a"].dtype(), dtype);
            assert!(by_level.values().all(|x| x.dtype() == dtype));
            (by_name, by_level)
        });
        assert_eq!(by_name["a"].dtype(), DType::F32);
        assert!(by_level.values().all(|x| x.dtype() == DType::F32));

        let sample = Sample {
            image: Tensor::ones([2, 2], device),
            boxes: Some(Boxes {
                corners: vec![Tensor::ones([1, 4], device)],
                scale: 0.5,
            }),
            label: Tensor::ones([1], device),
        };
        let label = sample.label.dtype();
        let sample = autocast.forward(sample, |sample| {
            assert_eq!(sample.image.dtype(), dtype);
            let boxes = sample.boxes.as_ref().unwrap();
            assert_eq!(boxes.corners[0].dtype(), dtype);
            assert_eq!(boxes.scale, 0.5);
            sample
        });
        assert_eq!(sample.image.dtype(), DType::F32);
        assert_eq!(sample.label.dtype(), label);

        let Pair(a, b) = autocast.forward(Pair(vector(), vector()), |pair| {
            assert_eq!((pair.0.dtype(), pair.1.dtype()), (dtype, dtype));
            pair
        });
        assert_eq!((a.dtype(), b.dtype()), (DType::F32, DType::F32));
    });
}

/// What holds tensors nowhere passes, too.
#[test]
fn plain_values_cross_the_edges() {
    fn crosses<T: Tensors + PartialEq + std::fmt::Debug + Clone>(value: T) {
        let (_, autocast) = prepared(FloatDType::F16, &Device::flex());
        assert_eq!(autocast.forward(value.clone(), |value| value), value);
    }
    crosses(String::from("caption"));
    crosses(("caption", 'c', 3u64, -1i8));
    crosses([1.5f64, 2.5]);
}
