//! What a calibration runs, and what it leaves as it was, in a model that is being trained.

use burn::module::{Module, Param};
use burn::nn::conv::{ConvTranspose1d, ConvTranspose1dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, Learned, Mapping, MixedPrecisionConfig, NumberFormat,
    ObserverConfig, PtqConfig, QatConfig, Scheme, WeightConfig, calibrate, quantizers,
};

use crate::support::{each_device, numbers, on_tracked, parameters, tensor, values, with_numbers};

/// A model that computes something else in training.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    dropout: Dropout,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            first: LinearConfig::new(6, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.5).init(),
            second: LinearConfig::new(8, 3).init(device),
        };
        with_numbers(net, 4)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward_q(self.first_half(x))
    }

    fn first_half(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.first.forward_q(x));
        self.dropout.forward(x)
    }
}

/// Two batches, far from what the running statistics say.
fn batches(device: &Device) -> Vec<Tensor<2>> {
    let batch = |seed| tensor(seed, [16, 6], device) * 3.0 + 2.0;
    vec![batch(1), batch(2)]
}

/// Mean and variance, with what a training step may have left for the next one to take in.
fn statistics(net: &Net) -> [Vec<f32>; 2] {
    let of = |state: &burn::module::RunningState<Tensor<1>>| {
        let value = state.value_sync();
        values(value.without_autodiff())
    };
    [of(&net.norm.running_mean), of(&net.norm.running_var)]
}

/// Path, lowest and highest value of each quantizer that keeps a range.
fn ranges<M: Module>(net: &M) -> Vec<(String, Vec<f32>, Vec<f32>)> {
    let kept = quantizers(net).into_iter().filter_map(|located| {
        let range = located.quantizer.range().ok()?;
        Some((located.path, values(range.min), values(range.max)))
    });
    kept.collect()
}

fn run(net: &Net, batches: &[Tensor<2>]) {
    for batch in batches {
        net.forward(batch.clone());
    }
}

#[test]
fn ranges_are_those_of_inference_and_running_statistics_stay() {
    each_device(|target| {
        let training = target.device.clone().autodiff();
        let float = Net::new(&training);
        let before = statistics(&float);
        let prepared = QatConfig::new().prepare(float).unwrap();
        let expected = calibrate(prepared.valid(), |net| run(net, &batches(&target.device)));
        let expected = ranges(&expected.unwrap());
        assert_eq!(expected.len(), 2);
        for device in [&training, &target.device] {
            let calibrated = calibrate(prepared.clone(), |net| run(net, &batches(device)));
            let calibrated = calibrated.unwrap();
            assert_eq!(ranges(&calibrated), expected);
            assert_eq!(statistics(&calibrated), before);
            assert_eq!(statistics(&prepared), before);
            // The model goes on training, with its dropout.
            assert!(calibrated.norm.training.is_enabled());
            assert!(calibrated.first.weight.is_require_grad());
        }
    });
}

#[test]
fn a_calibration_that_fails_leaves_running_statistics_as_they_were() {
    on_tracked(|device| {
        let prepared = QatConfig::new().prepare(Net::new(&device)).unwrap();
        let before = statistics(&prepared);
        // The second layer observes nothing.
        let rejected = calibrate(prepared, |net| {
            net.first_half(batches(&device).remove(0));
        });
        let error = rejected.unwrap_err();
        assert!(error.to_string().contains("second.weight.quant.input"));
        assert_eq!(statistics(error.value()), before);
    });
}

#[test]
fn a_learned_scale_of_the_values_at_hand_does_not_start_from_infinite_ones() {
    each_device(|target| {
        let config = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::int8()))
            .with_observer(ObserverConfig::Memoryless)
            .with_learned(Learned::Lsq);
        let x = tensor::<1>(1, [32], &target.device);
        let calibrated = |batches: &[Tensor<1>]| {
            let quantizer = config.init(&target.device).unwrap();
            calibrate(quantizer, |quantizer| {
                for batch in batches {
                    quantizer.forward(batch.clone());
                }
            })
        };
        let finite = [x.clone(), x.clone() * 0.5];
        assert!(calibrated(&finite).unwrap().is_learning());
        for broken in [f32::INFINITY, f32::NAN] {
            let broken = x.clone() * broken;
            for batches in [[x.clone(), broken.clone()], [broken, x.clone()]] {
                let rejected = calibrated(&batches).unwrap_err();
                assert_says!(rejected, "infinite or not a number");
                assert!(!rejected.value().is_learning());
            }
        }
    });
}

#[test]
fn learned_scales_are_trained_after_a_calibration_as_before() {
    on_tracked(|device| {
        let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(4).with_learned(Learned::Lsq))
            .with_activation(Some(activation.with_learned(Learned::LsqPlus)));
        let trained = |net: &Net| -> Vec<(String, bool)> {
            let learned = parameters(net).into_iter();
            let learned = learned.filter(|parameter| parameter.path.contains("learned"));
            learned
                .map(|parameter| (parameter.path, parameter.trains))
                .collect()
        };
        let prepared = config.prepare(Net::new(&device)).unwrap();
        let before = trained(&prepared);
        assert!(before.len() == 6 && before.iter().all(|(_, trains)| *trains));
        let calibrated = calibrate(prepared, |net| run(net, &batches(&device)));
        let calibrated = calibrated.unwrap();
        assert_eq!(trained(&calibrated), before);
        let learning = quantizers(&calibrated).into_iter();
        assert!(learning.map(|at| at.quantizer).all(|q| q.is_learning()));
    });
}

#[test]
fn post_training_quantization_runs_the_model_as_in_inference() {
    each_device(|target| {
        let training = target.device.clone().autodiff();
        let config = PtqConfig::new().with_progress(false);
        let quantize = |net: Net, device: &Device| {
            let data = batches(device);
            let quantized = config.quantize(
                net,
                || data.clone(),
                |net, x| {
                    net.forward(x);
                },
            );
            quantized.unwrap()
        };
        let float = Net::new(&training);
        let before = statistics(&float);
        let (expected, expected_report) = quantize(float.valid(), &target.device);
        for device in [&training, &target.device] {
            let (quantized, report) = quantize(float.clone(), device);
            assert_eq!(ranges(&quantized), ranges(&expected));
            assert_eq!(report.activations, expected_report.activations);
            assert_eq!(statistics(&quantized), before);
            assert_eq!(statistics(&float), before);
        }
    });
}

#[test]
fn an_allocation_runs_the_model_as_in_inference() {
    on_tracked(|device| {
        let float = Net::new(&device);
        let before = statistics(&float);
        let data = batches(&device);
        let observer = ObserverConfig::MinMax;
        let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let config = QatConfig::new().with_activation(Some(activation.with_observer(observer)));
        let expected = calibrate(config.prepare(float.valid()).unwrap(), |net| {
            run(net, &data)
        });
        let allocation = MixedPrecisionConfig::new(config)
            .allocate(
                float.clone(),
                |net| run(net, &data),
                |net| net.forward(data[0].clone()),
                |_| 1.0,
            )
            .unwrap();
        assert_eq!(ranges(&allocation.model), ranges(&expected.unwrap()));
        assert_eq!(statistics(&allocation.model), before);
        assert_eq!(statistics(&float), before);
    });
}

/// A layer that is rounded to nearest whatever its bits, and one that is rounded by its inputs.
#[derive(Module, Debug)]
struct Upsampled {
    up: ConvTranspose1d,
    head: Linear,
}

impl Upsampled {
    fn new(device: &Device) -> Self {
        let model = Self {
            up: ConvTranspose1dConfig::new([4, 6], 3).init(device),
            head: LinearConfig::new(6, 5).init(device),
        };
        let mut model = with_numbers(model, 3);
        // Of few large weights, so that a share of the range is better than the whole.
        let weights: Vec<f32> = numbers(5, 4 * 6 * 3).iter().map(|x| x.powi(5)).collect();
        let weights = TensorData::new(weights, [4, 6, 3]);
        model.up.weight = Param::from_tensor(Tensor::from_data(weights, device));
        model
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.up.forward_q(x).swap_dims(1, 2);
        self.head.forward_q(x)
    }

    fn weights(&self) -> [Vec<f32>; 2] {
        [values(self.up.weight.val()), values(self.head.weight.val())]
    }
}

#[test]
fn what_post_training_quantization_chose_stays_in_training_and_of_weights_in_a_calibration() {
    each_device(|target| {
        let training = target.device.clone().autodiff();
        let x = tensor::<3>(6, [8, 4, 7], &target.device);
        for (format, mapping) in [
            (NumberFormat::int(4).narrow(), Mapping::Symmetric),
            (NumberFormat::uint(4), Mapping::Affine),
        ] {
            for learned in [Learned::None, Learned::Lsq] {
                let weight = WeightConfig::new()
                    .with_format(format)
                    .with_mapping(mapping)
                    .with_learned(learned);
                let quantize = QatConfig::new().with_weight(weight);
                let config = PtqConfig::new()
                    .with_quantize(quantize)
                    .with_progress(false);
                let forward = |model: &Upsampled, x: Tensor<3>| drop(model.forward(x));
                let (model, report) = config
                    .quantize(Upsampled::new(&training), || [x.clone()], forward)
                    .unwrap();
                assert_eq!(report.rounding.weights[0].path, "head.weight");
                let chosen = ranges(&model);
                assert_eq!(chosen.len(), 4);
                let inference = model.valid().weights();

                // Of values that are three times as large.
                let wide = x.clone() * 3.0;
                forward(&model, wide.clone());
                assert_eq!(ranges(&model), chosen);
                assert_eq!(model.weights(), inference);
                assert_eq!(values(model.head.weight.base()), inference[1]);
                let prepared = config.qat_config().prepare(Upsampled::new(&training));
                let loaded = prepared.unwrap().load_record(model.clone().into_record());
                forward(&loaded, wide.clone());
                assert_eq!(ranges(&loaded), chosen);

                // Learned scales start anew, activations have the new range.
                if learned == Learned::None {
                    let again = calibrate(model, |model| forward(model, wide.clone())).unwrap();
                    assert_eq!(again.weights(), inference);
                    assert_ne!(ranges(&again), chosen);
                }
            }
        }
    });
}
