//! What quantizers observe is theirs: a mapper of the user's that changes floats does not reach it.

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::quant::{
    ForwardQ, Learned, ObserverConfig, PtqConfig, QatConfig, Site, WeightConfig, advance,
    calibrate, module::learned_parameters, quantizers,
};

use crate::support::{cast, on_tracked, tensor, values, with_numbers};

/// The clip of the weights of a critic.
struct Clip;

impl ModuleMapper for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let requires_grad = param.is_require_grad();
        param.map(|value| {
            value
                .detach()
                .clamp(-0.05, 0.05)
                .detach()
                .set_require_grad(requires_grad)
        })
    }
}

fn ranges<M: Module>(model: &M) -> Vec<Vec<f32>> {
    let observed = quantizers(model)
        .into_iter()
        .map(|located| located.quantizer)
        .filter(|quantizer| quantizer.config().observer.has_memory());
    let range = |quantizer: burn_lean::quant::FakeQuantize| {
        let range = quantizer.range().unwrap();
        [values(range.min), values(range.max)].concat()
    };
    observed.map(range).collect()
}

/// Weights with ranges of their own, and inputs.
fn prepared(device: &Device) -> Linear {
    let weight = WeightConfig::int(8).with_observer(ObserverConfig::MinMax);
    let layer = with_numbers(LinearConfig::new(6, 4).init(device), 5);
    let prepared = QatConfig::new().with_weight(weight).prepare(layer).unwrap();
    prepared.forward_q(tensor::<2>(1, [8, 6], device));
    prepared
}

#[test]
fn clipping_the_weights_leaves_observed_ranges_alone() {
    on_tracked(|device| {
        let layer = prepared(&device);
        let before = ranges(&layer);
        assert!(before.concat().iter().any(|bound| bound.abs() > 0.5));
        let clipped = layer.map(&mut Clip);
        assert_eq!(ranges(&clipped), before);
        let largest = values(clipped.weight.base())
            .into_iter()
            .fold(0.0, f32::max);
        assert!(largest <= 0.05, "{largest}");
        // And they go on observing.
        clipped.forward_q(tensor::<2>(1, [8, 6], &device) * 3.0);
        assert_ne!(ranges(&clipped), before);
    });
}

/// The clip of a critic whose quantizers learn.
struct ClipWeights {
    path: Vec<String>,
    learned: ParamGroup,
}

impl ModuleMapper for ClipWeights {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.learned.matches(&param.id, Some(&self.path.join("."))) {
            true => param,
            false => Clip.map_float(param),
        }
    }
}

/// To a mapper they are what they are to an optimizer, which is one, too.
#[test]
fn clipping_reaches_learned_scales_unless_they_are_left_out() {
    on_tracked(|device| {
        let learning = || {
            let weight = WeightConfig::int(4).with_learned(Learned::Lsq);
            let layer = with_numbers(LinearConfig::new(6, 4).init(&device), 5);
            let config = QatConfig::new().with_weight(weight);
            let layer = config.prepare(layer).unwrap();
            layer.forward_q(tensor::<2>(1, [8, 6], &device) * 3.0);
            layer
        };
        let scale = |layer: &Linear| {
            let mut found = quantizers(layer).into_iter();
            let weight = found.find(|located| located.site == Site::Weight).unwrap();
            assert!(weight.quantizer.is_learning());
            values(weight.quantizer.qparams().unwrap().scale)
        };
        let before = scale(&learning());
        assert!(before.iter().any(|scale| *scale > 0.05), "{before:?}");
        let observed = ranges(&learning());

        let clipped = learning().map(&mut Clip);
        assert!(scale(&clipped).iter().all(|scale| *scale <= 0.05));
        assert_eq!(ranges(&clipped), observed);

        let clipped = learning().map(&mut ClipWeights {
            path: Vec::new(),
            learned: learned_parameters(),
        });
        assert_eq!(scale(&clipped), before);
        assert_eq!(ranges(&clipped), observed);
        let weights = values(clipped.weight.base());
        assert!(weights.iter().all(|weight| weight.abs() <= 0.05));
    });
}

#[test]
fn casting_a_model_leaves_observed_ranges_alone() {
    let device = Device::flex();
    let layer = prepared(&device.clone().autodiff()).valid();
    let before = ranges(&layer);
    let cast = cast(layer, FloatDType::F16);
    assert_eq!(cast.weight.base().dtype(), DType::F16);
    assert_eq!(ranges(&cast), before);
}

#[test]
fn a_clipped_critic_trains_as_if_its_quantizers_were_elsewhere() {
    let device = Device::flex().autodiff();
    let mut layer = prepared(&device);
    let mut optim = SgdConfig::new().init();
    for step in 0..5 {
        // Real batches, then those of a generator, which is not as far yet.
        let width = if step % 2 == 0 { 1.0 } else { 0.2 };
        let x = tensor::<2>(step, [8, 6], &device) * width;
        let grads = layer.forward_q(x).sum().backward();
        let grads = GradientsParams::from_grads(grads, &layer);
        layer = advance(optim.step(0.01, layer, grads)).map(&mut Clip);
    }
    let input = layer.valid();
    let range = ranges(&input).pop().unwrap();
    assert!(range[0] < -0.9 && range[1] > 0.9, "{range:?}");
}

#[test]
fn records_still_load_ranges() {
    let device = Device::flex();
    let layer = prepared(&device.clone().autodiff()).valid();
    let bytes = layer.clone().into_record().into_bytes().unwrap();
    let fresh = || {
        let weight = WeightConfig::int(8).with_observer(ObserverConfig::MinMax);
        let layer = with_numbers(LinearConfig::new(6, 4).init(&device), 6);
        QatConfig::new().with_weight(weight).prepare(layer).unwrap()
    };
    let record = ModuleRecord::from_bytes(bytes).unwrap();
    let loaded = fresh().try_load_record(record).unwrap();
    assert_eq!(ranges(&loaded), ranges(&layer));
}

#[test]
fn what_a_copy_of_the_model_observes_in_a_calibration_counts() {
    let device = Device::flex();
    let layer = || with_numbers(LinearConfig::new(6, 4).init(&device), 5);
    let x = tensor::<2>(1, [8, 6], &device);
    let by_itself = QatConfig::new().prepare(layer()).unwrap();
    let by_itself = calibrate(by_itself, |layer| drop(layer.forward_q(x.clone()))).unwrap();
    let by_copy = QatConfig::new().prepare(layer()).unwrap();
    let by_copy = calibrate(by_copy, |layer| {
        layer.valid().forward_q(x.clone());
    })
    .unwrap();
    assert_eq!(ranges(&by_copy), ranges(&by_itself));
    let config = PtqConfig::new().with_progress(false);
    let (quantized, _) = config
        .quantize(
            layer(),
            || [x.clone()],
            |layer, x| {
                layer.valid().forward_q(x);
            },
        )
        .unwrap();
    assert!(!ranges(&quantized).is_empty());
    // Once it is over, each copy has its own again.
    let copy = by_copy.clone().train();
    copy.forward_q(tensor::<2>(2, [8, 6], &device.clone().autodiff()) * 9.0);
    assert_eq!(ranges(&by_copy), ranges(&by_itself));
}
