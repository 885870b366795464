//! The file of a compressed model.

use std::fs;

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Int, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, OneShotError, Preset, Report, load_compressed};
use burn_lean::reparam::attach;

use crate::support::{on_each, parameters, scratch, tensor, values, with_numbers};
use crate::{small_llama, tokens};

#[test]
fn a_model_comes_back_bit_by_bit_from_a_smaller_file() {
    on_each(|device| {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "w4a16-g6",
            "w3a16",
            "sparse-0.7",
            "sparse-2:4-w4a16-g8",
            "w8a16",
        ] {
            let preset: Preset = name.parse().unwrap();
            let done = OneShot::new(preset)
                .compress(small_llama(device), tokens(device), |model, x| {
                    model.forward(x)
                })
                .unwrap();
            let file = folder.path().join(format!("{name}.safetensors"));
            done.save(&file).unwrap();
            let other = with_numbers(small_llama(device), 99);
            let loaded = load_compressed(other, &file).unwrap();
            assert_eq!(parameters(&done.model), parameters(&loaded.model), "{name}");
            assert_eq!(loaded.weights, done.weights, "{name}");
            let told = |report: &Report| (report.rows, report.bytes(), report.sparsity());
            assert_eq!(told(&loaded.report), told(&done.report), "{name}");

            let compressed: usize = done.report.layers.iter().map(|one| one.weights).sum();
            let stored = 4 * (done.model.num_params() - compressed) + done.report.bytes();
            let bytes = fs::metadata(&file).unwrap().len() as usize;
            let header = bytes - stored;
            assert!(
                (8..16_000).contains(&header),
                "{name}: {bytes} bytes, {stored} of numbers"
            );
        }
    });
}

#[test]
fn files_that_do_not_fit_are_refused_with_the_model() {
    let device = burn::tensor::Device::flex();
    let (_folder, file) = scratch("model.safetensors");
    let error = load_compressed(small_llama(&device), &file).unwrap_err();
    assert_matches!(error.error(), OneShotError::File { .. });

    let done = OneShot::new(Preset::w4a16().with_group(8))
        .compress(small_llama(&device), tokens(&device), |model, x| {
            model.forward(x)
        })
        .unwrap();
    done.save(&file).unwrap();
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
    let error = load_compressed(small_llama(&device), &file).unwrap_err();
    assert_eq!(parameters(error.value()), parameters(&small_llama(&device)));

    fs::write(&file, &bytes).unwrap();
    let linear: burn::nn::Linear = burn::nn::LinearConfig::new(3, 2).init(&device);
    assert_says!(load_compressed(linear, &file).unwrap_err(), "weight");
}

/// A table, and a matrix that is compressed.
#[derive(Module, Debug)]
struct Tabled {
    table: Embedding,
    head: Linear,
}

#[test]
fn as_many_numbers_in_another_shape_are_refused() {
    let device = burn::tensor::Device::flex();
    let (_folder, file) = scratch("model.safetensors");
    let linear =
        |from, to| -> Linear { LinearConfig::new(from, to).with_bias(false).init(&device) };
    OneShot::new("w4a16-g8".parse().unwrap())
        .compress(
            linear(16, 8),
            [tensor::<2>(5, [40, 16], &device)],
            Linear::forward,
        )
        .unwrap()
        .save(&file)
        .unwrap();
    load_compressed(linear(16, 8), &file).unwrap();
    let error = load_compressed(linear(8, 16), &file).unwrap_err();
    assert_says!(error, "`weight` of 8 outputs and 16 inputs");

    let kernel = |from, to| -> Conv2d {
        Conv2dConfig::new([from, to], [3, 3])
            .with_bias(false)
            .init(&device)
    };
    OneShot::new(Preset::w8a16())
        .compress(
            kernel(4, 8),
            [tensor::<4>(5, [2, 4, 6, 6], &device)],
            Conv2d::forward,
        )
        .unwrap()
        .save(&file)
        .unwrap();
    load_compressed(kernel(4, 8), &file).unwrap();
    let error = load_compressed(kernel(8, 4), &file).unwrap_err();
    assert_says!(error, "8 outputs");

    let tabled = |rows, width| Tabled {
        table: EmbeddingConfig::new(rows, width).init(&device),
        head: LinearConfig::new(4, 3).init(&device),
    };
    let indices = Tensor::<2, Int>::zeros([2, 3], &device);
    OneShot::new(Preset::w8a16())
        .compress(tabled(10, 4), [indices], |model, x| {
            model.head.forward(model.table.forward(x))
        })
        .unwrap()
        .save(&file)
        .unwrap();
    load_compressed(tabled(10, 4), &file).unwrap();
    let error = load_compressed(tabled(4, 10), &file).unwrap_err();
    assert_says!(error, "table.weight", "[10, 4]", "[4, 10]");
}

/// Whichever way a constant matrix is read, it gives the same numbers.
#[test]
fn a_constant_weight_lies_in_the_file_as_in_its_parameter() {
    let device = burn::tensor::Device::flex();
    let net = || -> Vec<burn::nn::Linear> {
        let layer = |[from, to]: [usize; 2]| {
            let mut layer = burn::nn::LinearConfig::new(from, to).init(&device);
            layer.weight = Param::from_tensor(Tensor::ones([from, to], &device));
            layer
        };
        vec![layer([8, 12]), layer([12, 6])]
    };
    // Zeros are those of inputs that are always zero.
    let x = tensor::<2>(3, [20, 8], &device);
    let alive = Tensor::<2>::from_floats([[1., 0., 0., 1., 1., 0., 1., 0.]], &device);
    let x = x * alive.expand([20, 8]);
    let preset = Preset::sparse(0.5);
    let done = OneShot::new(preset).compress(net(), [x], |net, x| {
        net.iter().fold(x, |x, layer| layer.forward(x))
    });
    let done = done.unwrap();
    let (_folder, file) = scratch("model.safetensors");
    done.save(&file).unwrap();
    let loaded = load_compressed(net(), &file).unwrap();
    assert_eq!(parameters(&loaded.model), parameters(&done.model));
    assert!(done.weights.iter().all(|weight| weight.transposed));
}

/// An adapter is saved beside the codes, and comes back into a model that has one; a weight that is another one than
/// its codes say is refused.
#[test]
fn what_was_trained_since_is_saved_or_refused() {
    let device = burn::tensor::Device::flex();
    let (_folder, file) = scratch("model.safetensors");
    let linear = |seed| -> Linear {
        let linear = LinearConfig::new(16, 8).init(&device);
        with_numbers(linear, seed)
    };
    /// With a second matrix that is not zero.
    struct Fill(u64);
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let size = param.base().clone().abs().sum().into_scalar::<f32>();
            match size == 0.0 {
                true => param.map(|old| tensor::<D>(self.0, old.dims(), &old.device())),
                false => param,
            }
        }
    }
    let adapted = |linear: Linear, seed| {
        let lora = attach(linear, Lora::new(2, 4.0)).unwrap();
        lora.map(&mut Fill(seed))
    };
    let x = tensor::<2>(5, [40, 16], &device);
    let done = OneShot::new("w4a16-g8".parse().unwrap())
        .compress(linear(3), [x.clone()], Linear::forward)
        .unwrap();
    let trained = Compressed {
        model: adapted(done.model.clone(), 7),
        report: done.report.clone(),
        weights: done.weights.clone(),
    };
    let expected = values(trained.model.forward(x.clone()));
    assert_ne!(values(done.model.forward(x.clone())), expected);
    trained.save(&file).unwrap();
    let loaded = load_compressed(adapted(linear(4), 8), &file).unwrap();
    assert_eq!(values(loaded.model.forward(x.clone())), expected);
    let plain = load_compressed(linear(4), &file).unwrap_err();
    assert_says!(plain, "parameters that the model has not");

    let changed = Compressed {
        model: trained.model.materialize(),
        report: done.report,
        weights: done.weights,
    };
    let refused = changed.save(&file).unwrap_err();
    let expected = OneShotError::Changed {
        path: "weight".into(),
    };
    assert_eq!(refused, expected);
    assert_eq!(*changed.prepare(None).unwrap_err().error(), expected);
}
