//! What quantizers observe in training: constants too, but nothing that is not finite.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    FakeQuantize, FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, QatConfig,
    QuantError, RangeMethod, Scheme, Site, WeightQuantizer, quantizers,
};

use rayon::prelude::*;

use crate::support::{each_device, on_tracked, tensor, values, with_numbers};

fn batch(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_floats(values, device)
}

fn range(quantizer: &FakeQuantize) -> (f32, f32) {
    let range = quantizer.range().unwrap();
    (values(range.min)[0], values(range.max)[0])
}

fn quantizer(observer: ObserverConfig, device: &Device) -> FakeQuantize {
    let config = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    config.with_observer(observer).init(device).unwrap()
}

/// Every way to keep a range, on every device.
fn each_observer(test: impl Fn(ObserverConfig, &Device)) {
    let observers = [
        ObserverConfig::MinMax,
        ObserverConfig::MovingAverage {
            averaging_constant: 0.5,
        },
        ObserverConfig::histogram(RangeMethod::Search),
    ];
    on_tracked(|device| {
        for observer in observers {
            test(observer, &device);
        }
    });
}

// The finite ones do not widen the range.
const NOT_FINITE: [[f32; 3]; 5] = [
    [f32::INFINITY, 1.0, -1.0],
    [1.0, f32::NEG_INFINITY, -1.0],
    [f32::INFINITY, f32::NEG_INFINITY, 0.0],
    [1.0, -1.0, f32::NAN],
    [f32::NAN, f32::NAN, f32::NAN],
];

#[test]
fn a_batch_that_is_not_finite_leaves_the_range_as_it_is() {
    each_observer(|observer, device| {
        for numbers in NOT_FINITE {
            let quantizer = quantizer(observer, device);
            quantizer.forward(batch(&[-1.0, 1.0], device));
            quantizer.forward(batch(&numbers, device));
            assert_eq!(range(&quantizer), (-1.0, 1.0), "{observer:?} {numbers:?}");
            // And those after it count.
            quantizer.forward(batch(&[-1.0, 3.0], device));
            let highest = match observer {
                ObserverConfig::MinMax => 3.0,
                ObserverConfig::MovingAverage { .. } => 2.0,
                _ => 1.0,
            };
            assert_eq!(
                range(&quantizer),
                (-1.0, highest),
                "{observer:?} {numbers:?}"
            );
        }
    });
}

#[test]
fn after_a_first_batch_that_is_not_finite_the_next_one_sets_the_range() {
    each_observer(|observer, device| {
        for numbers in NOT_FINITE {
            let quantizer = quantizer(observer, device);
            quantizer.forward(batch(&numbers, device));
            let QuantError::Parameter { error, .. } = quantizer.qparams().unwrap_err() else {
                panic!("no path")
            };
            assert_eq!(*error, QuantError::NonFinite { what: "range" });
            quantizer.forward(batch(&[-0.5, 2.0], device));
            assert_eq!(range(&quantizer), (-0.5, 2.0), "{observer:?} {numbers:?}");
            let y = quantizer.valid().forward(batch(&[2.0], device));
            assert_eq!(values(y), [2.0]);
        }
    });
}

#[test]
fn only_the_group_that_is_not_finite_keeps_its_range() {
    on_tracked(|device| {
        let scheme = Scheme::symmetric(NumberFormat::int8())
            .with_granularity(burn_lean::quant::Granularity::PerChannel { axis: 0 });
        let config = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::MinMax);
        let quantizer = config.init_for(&[2, 2], &device).unwrap();
        let x = |numbers: [[f32; 2]; 2]| Tensor::<2>::from_floats(numbers, &device);
        quantizer.forward(x([[-1.0, 1.0], [-2.0, 2.0]]));
        quantizer.forward(x([[-3.0, f32::INFINITY], [-4.0, 4.0]]));
        let range = quantizer.range().unwrap();
        assert_eq!(values(range.min), [-1.0, -4.0]);
        assert_eq!(values(range.max), [1.0, 4.0]);
    });
}

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    linear: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([1, 2], [2, 2]).init(device),
            linear: LinearConfig::new(8, 3).init(device),
        };
        with_numbers(net, 5)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x: Tensor<2> = self.conv.forward_q(x).flatten(1, 3);
        self.linear.forward_q(x)
    }
}

fn inputs<M: Module>(model: &M) -> Vec<FakeQuantize> {
    let inputs = quantizers(model).into_iter();
    let inputs = inputs.filter(|located| located.site == Site::Input);
    inputs.map(|located| located.quantizer).collect()
}

#[test]
fn batches_without_autodiff_are_observed_by_the_first_layer_in_training() {
    each_device(|target| {
        let plain = &target.device;
        let training = plain.clone().autodiff();
        let x = tensor::<4>(1, [3, 1, 3, 3], plain);
        for device in [training.clone(), training.gradient_checkpointing()] {
            let prepared = || QatConfig::new().prepare(Net::new(&device)).unwrap();
            let net = prepared();
            let y = net.forward(x.clone());
            let other = prepared();
            let on_device = Tensor::from_data(x.to_data(), &device);
            assert_eq!(values(y.clone()), values(other.forward(on_device)));
            for (a, b) in inputs(&net).iter().zip(&inputs(&other)) {
                assert_eq!(range(a), range(b));
            }
            // It is a constant: the gradient is that of the weights.
            let grads = y.sum().backward();
            assert!(net.conv.weight.base().grad(&grads).is_some());
        }
    });
}

#[test]
fn recurrent_layers_observe_a_sequence_without_autodiff_too() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let lstm: Lstm = LstmConfig::new(4, 3, true).init(&device);
        let lstm = QatConfig::new().prepare(with_numbers(lstm, 2)).unwrap();
        let x = tensor::<3>(1, [2, 3, 4], &target.device);
        lstm.forward_q((x.clone(), None));
        assert!(inputs(&lstm).iter().all(FakeQuantize::is_observed));
        let gate = WeightQuantizer::of(&lstm.input_gate.input_transform.weight).unwrap();
        let numbers = values(x);
        let highest = numbers.iter().fold(f32::MIN, |a, b| a.max(*b));
        assert_eq!(range(gate.input.as_ref().unwrap()).1, highest);
    });
}

#[test]
fn in_inference_nothing_is_observed_wherever_the_batch_is() {
    each_device(|target| {
        let plain = &target.device;
        let training = plain.clone().autodiff();
        let observed = |net: &Net, device: &Device| {
            net.forward(tensor(1, [3, 1, 3, 3], device));
            inputs(net).iter().any(FakeQuantize::is_observed)
        };
        let prepare = |device: &Device| QatConfig::new().prepare(Net::new(device)).unwrap();
        assert!(!observed(&prepare(&training).valid(), plain));
        assert!(!observed(&prepare(&training).valid(), &training));
        assert!(!observed(&prepare(&training).freeze(), plain));
        assert!(!observed(&prepare(plain), plain));
    });
}

#[test]
fn batches_of_several_threads_are_all_part_of_the_range() {
    let device = Device::flex().autodiff();
    for _ in 0..8 {
        let quantizer = quantizer(ObserverConfig::MinMax, &device);
        (0..32u8).into_par_iter().for_each(|number| {
            let highest = f32::from(number);
            quantizer.forward(batch(&[-2.0 * highest, highest], &device));
        });
        assert_eq!(range(&quantizer), (-62.0, 31.0));
    }
}
