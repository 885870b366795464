//! Models that come from the layout of compressed-tensors compute what those that went into it did.

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::deploy::Export;
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, Granularity, NumberFormat, ObserverConfig, Override,
    PtqConfig, PtqMode, QatConfig, Scheme, WeightConfig, calibrate,
    deploy::{load_compressed_tensors, save_compressed_tensors},
    quantized_weights,
};
use burn_lean::reparam::{ChainReparameterizer, attach};

use crate::compressed_tensors::Net;
use crate::support::{cast, scratch, tensor, values, with_numbers};

/// As checkpoints come: everything but the codes in half precision, say.
#[test]
fn a_checkpoint_in_another_precision_gives_a_model_in_it() {
    let device = Device::flex();
    let (_folder, path) = scratch("other.safetensors");
    for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F64] {
        let config = QatConfig::new().with_activation(None);
        let net = cast(Net::new(3, &device), dtype);
        let net = config.prepare(net).unwrap();
        let x = tensor::<2>(5, [4, 16], &device).cast(dtype);
        let expected = values(net.forward(x.clone()).cast(FloatDType::F32));
        save_compressed_tensors(&net, &path).unwrap();
        let fresh = || Net::new(4, &device);
        let other = || cast(fresh(), dtype);
        for model in [
            fresh(),
            other(),
            config.prepare(fresh()).unwrap(),
            config.prepare(other()).unwrap(),
        ] {
            let loaded = load_compressed_tensors(model, &path).unwrap();
            assert_eq!(loaded.fc1.weight.val().dtype(), dtype.into());
            let found = loaded.forward(x.clone());
            assert_eq!(found.dtype(), dtype.into());
            assert_eq!(values(found.cast(FloatDType::F32)), expected);
        }
    }
}

#[test]
fn codes_without_floats_beside_them_are_in_the_dtype_of_the_model() {
    let device = Device::flex();
    let (_folder, path) = scratch("codes.safetensors");
    let config = QatConfig::new().with_activation(None);
    for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::F64] {
        let fresh = |seed| -> Vec<Linear> {
            let layer = LinearConfig::new(8, 6).with_bias(false).init(&device);
            cast(with_numbers(vec![layer], seed), dtype)
        };
        let x = tensor::<2>(5, [4, 8], &device).cast(dtype);
        let prepared = config.prepare(fresh(3)).unwrap();
        let expected = values(prepared[0].forward(x.clone()));
        save_compressed_tensors(&prepared, &path).unwrap();
        for model in [fresh(4), config.prepare(fresh(4)).unwrap()] {
            let loaded = load_compressed_tensors(model, &path).unwrap();
            let found = loaded[0].forward(x.clone());
            assert_eq!(found.dtype(), dtype.into());
            assert_eq!(values(found), expected);
        }
    }
}

/// With a matrix of its own, which acts.
fn adapted<M: Module>(model: M, device: &Device) -> M {
    struct Fill<'a>(&'a Device);
    impl ModuleMapper for Fill<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let zeros = param.base().clone().abs().sum().into_scalar::<f32>() == 0.0;
            let shape = param.base().dims();
            match zeros {
                true => param.map(|_| tensor::<D>(11, shape, self.0)),
                false => param,
            }
        }
    }
    model.map(&mut Fill(device))
}

#[test]
fn an_adapter_is_in_the_file_whatever_it_acts_behind() {
    let device = Device::flex();
    let (_folder, path) = scratch("adapted.safetensors");
    let config = QatConfig::new().with_activation(None);
    let net = Net::new(3, &device);
    let quantizers = config.reparameterizer(&net).unwrap();
    let alone = attach(net.clone(), Lora::new(2, 1.0)).unwrap();
    let behind = ChainReparameterizer::new(quantizers, Lora::new(2, 1.0));
    let behind = attach(net.clone(), behind).unwrap();
    for (adapted, left_out) in [(adapted(alone, &device), 0), (adapted(behind, &device), 2)] {
        let x = tensor::<2>(5, [4, 16], &device);
        let expected = values(adapted.forward(x.clone()));
        let report = save_compressed_tensors(&adapted, &path).unwrap();
        assert_eq!(report.left_out.len(), left_out, "{:?}", report.left_out);
        let loaded = load_compressed_tensors(Net::new(4, &device), &path).unwrap();
        let found = values(loaded.forward(x));
        // The same sums in another order.
        assert_near!(found.iter(), &expected, 1e-4);
    }
}

#[test]
fn inputs_of_another_granularity_are_refused_with_the_layer() {
    let device = Device::flex();
    let (_folder, path) = scratch("static.safetensors");
    let scheme = Scheme::symmetric(NumberFormat::int(8));
    let of = |scheme: Scheme, observer: ObserverConfig| {
        let activation = FakeQuantizeConfig::new(scheme).with_observer(observer);
        let config = QatConfig::new().with_activation(Some(activation));
        config.prepare(Net::new(3, &device)).unwrap()
    };
    let of_all = || of(scheme.clone(), ObserverConfig::MinMax);
    let by_row = || {
        let scheme = scheme.clone().with_granularity(Granularity::PerToken);
        of(scheme, ObserverConfig::Memoryless)
    };
    let x = tensor::<2>(5, [4, 16], &device);
    let net = calibrate(of_all(), |net| drop(net.forward(x.clone()))).unwrap();
    save_compressed_tensors(&net, &path).unwrap();
    load_compressed_tensors(of_all(), &path).unwrap();
    let refused = |net: Net| load_compressed_tensors(net, &path).unwrap_err();
    assert_says!(
        refused(by_row()),
        "fc1.weight",
        "is INT8, symmetric, per tensor, not INT8, symmetric, per token, dynamic"
    );
    // Of the same scheme, but not of the same time.
    let at_hand = || of(scheme.clone(), ObserverConfig::Memoryless);
    assert_says!(refused(at_hand()), "fc1.weight", "`ObserverConfig::MinMax`");
    save_compressed_tensors(&at_hand(), &path).unwrap();
    load_compressed_tensors(at_hand(), &path).unwrap();
    assert_says!(refused(of_all()), "`ObserverConfig::Memoryless`");
    save_compressed_tensors(&by_row(), &path).unwrap();
    load_compressed_tensors(by_row(), &path).unwrap();
    assert_says!(refused(of_all()), "per token, dynamic, not INT8");
}

#[derive(Module, Debug)]
struct Images {
    conv: Conv2d,
    head: Linear,
}

/// Kernels are floats in the file, and have no range where they are loaded: they stay the floats that they are.
#[test]
fn what_came_as_floats_is_not_quantized_anew() {
    let device = Device::flex();
    let (_folder, path) = scratch("kernels.safetensors");
    let fresh = |seed| {
        let images = Images {
            conv: Conv2dConfig::new([2, 3], [3, 3]).init(&device),
            head: LinearConfig::new(12, 5).init(&device),
        };
        with_numbers(images, seed)
    };
    let forward = |model: &Images, x: Tensor<4>| {
        let x = model.conv.forward(x);
        model.head.forward(x.flatten::<2>(1, 3))
    };
    let x = tensor::<4>(5, [2, 2, 4, 4], &device);
    let config = PtqConfig::new()
        .with_mode(PtqMode::WeightOnly)
        .with_quantize(QatConfig::new().with_weight(WeightConfig::int(4)));
    let inputs = || [x.clone()];
    let (model, _) = config.quantize_for(fresh(3), inputs, forward).unwrap();
    let expected = values(forward(&model, x.clone()));
    save_compressed_tensors(&model, &path).unwrap();
    let prepared = config.qat_config().prepare(fresh(4)).unwrap();
    let loaded = load_compressed_tensors(prepared, &path).unwrap();
    assert_eq!(values(forward(&loaded, x.clone())), expected);
    // As it is, and saved and exported again.
    let again = path.with_file_name("again.safetensors");
    save_compressed_tensors(&loaded, &again).unwrap();
    let exported = Export::record(&loaded, &x, forward).unwrap();
    assert_eq!(exported.quantization().weights().count(), 1);
    let (converted, _) = ConvertConfig::new().convert(loaded).unwrap();
    assert_eq!(values(forward(&converted, x)), expected);
}

/// A model whose quantizers take the range of the values at hand would round it with that.
#[test]
fn a_layer_that_was_spared_is_not_rounded_where_it_is_loaded() {
    let device = Device::flex();
    let (_folder, path) = scratch("spared.safetensors");
    let fresh = |seed| -> Vec<Linear> {
        let layers = (0..2).map(|_| LinearConfig::new(8, 8).init(&device));
        with_numbers(layers.collect(), seed)
    };
    let config = QatConfig::new().with_activation(None);
    let spared = Override::new("1".into()).with_skip(Some(true));
    let sparing = config.clone().with_overrides(vec![spared]);
    let model = sparing.prepare(fresh(1)).unwrap();
    save_compressed_tensors(&model, &path).unwrap();
    let prepared = config.prepare(fresh(3)).unwrap();
    let loaded = load_compressed_tensors(prepared, &path).unwrap();
    for (loaded, saved) in loaded.iter().zip(&model) {
        assert_eq!(values(loaded.weight.val()), values(saved.weight.val()));
    }
    let codes = |model: &Vec<Linear>| quantized_weights(model).unwrap();
    assert_eq!(codes(&loaded), codes(&model));
}
