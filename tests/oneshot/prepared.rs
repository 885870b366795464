//! Compressed weights with quantizers, as files and engines read them.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_lean::deploy::{Arithmetic, Backend, EngineConfig, Execution, Export, Form};
use burn_lean::oneshot::{
    Activations, Compressed, OneShot, OneShotError, Preset, Quantize, Rounding, load_compressed,
};
use burn_lean::quant::{
    QuantizedForward,
    deploy::{load_compressed_tensors, save_compressed_tensors},
    module::Site,
    quantized_weights, quantizers,
};

use crate::llama::Llama;
use crate::support::{each_device, on_each, parameters, values, with_numbers};
use crate::{small_llama, tokens};

fn compressed(preset: &str, device: &Device) -> Compressed<Llama> {
    OneShot::new(preset.parse().unwrap())
        .compress(small_llama(device), tokens(device), |model, x| {
            model.forward(x)
        })
        .unwrap()
}

/// With zero points and without, in groups that cut a row short, and with zeros.
const PRESETS: [&str; 5] = [
    "w4a16-g8",
    "w4a16-g6",
    "w3a16",
    "w8a16",
    "sparse-2:4-w4a16-g8",
];

#[test]
fn quantizers_have_the_codes_of_the_weights_and_give_back_their_values() {
    each_device(|target| {
        for preset in PRESETS {
            let done = compressed(preset, &target.device);
            let prepared = done.clone().prepare(None).unwrap();
            assert_eq!(prepared.left_float, [], "{preset}");
            let x = tokens(&target.device).remove(0);
            assert_eq!(
                values(prepared.model.forward(x.clone())),
                values(done.model.forward(x)),
                "{preset}"
            );
            let found = quantized_weights(&prepared.model).unwrap();
            assert_eq!(found.len(), done.weights.len());
            for weight in &done.weights {
                let (_, codes) = found.iter().find(|(path, _)| *path == weight.path).unwrap();
                let grid = weight.grid.as_ref().unwrap();
                let middle = match grid.symmetric {
                    true => 1_i16 << (grid.bits - 1),
                    false => 0,
                };
                let (codes, outputs) = (codes.codes(), weight.outputs);
                assert!(weight.transposed);
                for (at, code) in grid.codes.iter().enumerate() {
                    let (output, input) = (at / weight.inputs, at % weight.inputs);
                    let expected = i16::from(*code) - middle;
                    assert_eq!(codes[input * outputs + output], expected, "{preset}");
                }
            }
        }
    });
}

/// From the file of the codes to one that vLLM reads, and back.
#[test]
fn a_loaded_file_becomes_one_of_compressed_tensors() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    // The layout has no group that is smaller than the others.
    for preset in ["w4a16-g4", "w3a16", "w8a16", "sparse-2:4-w4a16-g4"] {
        let done = compressed(preset, &device);
        let own = folder.path().join("own.safetensors");
        done.save(&own).unwrap();
        let loaded = load_compressed(with_numbers(small_llama(&device), 99), &own).unwrap();
        let prepared = loaded.prepare(None).unwrap().model;
        let file = folder.path().join("other.safetensors");
        let report = save_compressed_tensors(&prepared, &file).unwrap();
        assert_eq!(report.left_out, [], "{preset}");
        assert_eq!(report.quantized.len(), done.weights.len(), "{preset}");
        let other = with_numbers(small_llama(&device), 98);
        let loaded = load_compressed_tensors(other, &file).unwrap();
        assert_eq!(parameters(&loaded), parameters(&done.model), "{preset}");
    }
}

#[test]
fn an_export_has_the_codes_and_the_engine_the_outputs() {
    let device = Device::flex();
    let exported = |model: &Llama| {
        let forward = |model: &Llama, x: Tensor<2, Int>| model.forward(x);
        let x = tokens(&device).remove(1);
        let export = Export::record(model, &x, forward).unwrap();
        let bytes = export.to_onnx(Form::Qdq).unwrap().model.to_bytes().unwrap();
        let engine = EngineConfig::new().compile(export).unwrap();
        (bytes.len(), values::<3>(engine.run(&x).unwrap()))
    };
    let done = compressed("w8a16", &device);
    let (floats, expected) = exported(&done.model);
    let (codes, found) = exported(&done.clone().prepare(None).unwrap().model);
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert_near!(found.iter(), &expected, 2e-5 * largest);
    let weights: usize = done.report.layers.iter().map(|layer| layer.weights).sum();
    // Three bytes of four go; scales and nodes come.
    assert!(codes < floats - weights, "{codes} of {floats}");
}

#[test]
fn engines_multiply_the_codes_of_presets() {
    let device = Device::flex();
    let x = tokens(&device).remove(1);
    let forward = |model: &Llama, x: Tensor<2, Int>| model.forward(x);
    for (name, execution) in [
        ("w8a16", Execution::WeightsInteger),
        ("w4a16-g8", Execution::WeightsInteger),
        ("w8a8", Execution::Integer),
        ("w4a8-g8", Execution::Integer),
    ] {
        let preset: Preset = name.parse().unwrap();
        let done = compressed(name, &device);
        let weights = done.weights.len();
        let prepared = done.prepare(preset.activations.as_ref()).unwrap();
        let quantized = QuantizedForward::new();
        let expected = quantized.run(&prepared.model, x.clone(), forward).unwrap();
        let export = Export::record(&prepared.model, &x, forward).unwrap();
        assert_eq!(export.quantization().left_float().count(), 0, "{name}");
        let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let config = config.with_backend(Some(Backend::Own));
        let engine = config.compile(export).unwrap();
        let layers = engine.report().layers;
        let quantized = layers.iter().filter(|layer| layer.execution == execution);
        assert_eq!(quantized.count(), weights, "{name} {layers:?}");
        let (found, expected) = (engine.run(&x).unwrap(), expected);
        let (found, expected) = (values::<3>(found), values::<3>(expected));
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        // Where codes are rounded the last bit of a sum may decide, and the next layers weigh it.
        let share = match execution {
            Execution::Integer => 0.05,
            _ => 2e-5,
        };
        assert_near!(found.iter(), &expected, share * largest);
    }
}

/// With a matrix that belongs to no layer of Burn's.
#[derive(Module, Debug)]
struct Own {
    conv: Conv2d,
    matrix: Param<Tensor<2>>,
}

impl Own {
    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.conv.forward(x);
        let [batch, channels, height, width] = x.dims();
        let places = x.reshape([batch, channels, height * width]);
        let rows = places.mean_dim(2).reshape([batch, channels]);
        rows.matmul(self.matrix.val())
    }
}

#[test]
fn groups_that_cut_windows_stay_float_and_own_matrices_do_not() {
    on_each(|device| {
        let model = Own {
            conv: Conv2dConfig::new([4, 6], [3, 3]).init(device),
            matrix: Param::from_tensor(Tensor::zeros([6, 8], device)),
        };
        let model = with_numbers(model, 5);
        let x = Tensor::<4>::random([24, 4, 8, 8], Distribution::Normal(0.0, 1.0), device);
        let of_groups = |group: usize| {
            let quantize = Quantize::new(4)
                .with_group(Some(group))
                .with_rounding(Rounding::Nearest);
            let preset = Preset::new().with_quantize(Some(quantize));
            OneShot::new(preset)
                .compress(model.clone(), [x.clone()], |model, x| model.forward(x))
                .unwrap()
        };
        let same = |a: &Own, b: &Own| values(a.forward(x.clone())) == values(b.forward(x.clone()));
        // Two channels with their windows; of the matrix all inputs.
        let done = of_groups(18);
        let prepared = done.clone().prepare(None).unwrap();
        assert_eq!(prepared.left_float, []);
        assert_eq!(quantized_weights(&prepared.model).unwrap().len(), 2);
        assert!(same(&prepared.model, &done.model));

        let done = of_groups(4);
        let prepared = done.clone().prepare(None).unwrap();
        let [(path, why)] = &prepared.left_float[..] else {
            panic!("{:?}", prepared.left_float)
        };
        assert_eq!(path, "conv.weight");
        assert_says!(why, "windows of 9");
        let quantized = quantized_weights(&prepared.model).unwrap();
        let paths: Vec<&str> = quantized.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["matrix"]);
        assert!(same(&prepared.model, &done.model));
    });
}

/// With a kernel that belongs to no layer of Burn's.
#[derive(Module, Debug)]
struct Patches {
    kernel: Param<Tensor<4>>,
    head: Linear,
}

#[test]
fn an_own_kernel_carries_its_codes_beside_layers() {
    on_each(|device| {
        let model = Patches {
            kernel: Param::from_tensor(Tensor::zeros([6, 4, 2, 2], device)),
            head: LinearConfig::new(6, 8).init(device),
        };
        let model = with_numbers(model, 5);
        let forward = |model: &Patches, x: Tensor<4>| {
            let options = ConvOptions::new([2, 2], [0, 0], [1, 1], 1);
            let x = conv2d(x, model.kernel.val(), None, options);
            let [batch, channels, height, width] = x.dims();
            let x = x.reshape([batch, channels, height * width]);
            model.head.forward(x.swap_dims(1, 2))
        };
        let x = Tensor::<4>::random([4, 4, 8, 8], Distribution::Normal(0.0, 1.0), device);
        let done = OneShot::new(Preset::w8a16()).compress(model, [x.clone()], forward);
        let done = done.unwrap();
        assert_eq!(done.weights.len(), 2);
        let prepared = done.clone().prepare(None).unwrap();
        assert_eq!(prepared.left_float, []);
        assert_eq!(quantized_weights(&prepared.model).unwrap().len(), 2);
        let same = values(forward(&prepared.model, x.clone())) == values(forward(&done.model, x));
        assert!(same);
    });
}

/// Rows of images are no tokens: a report of inputs in 8 bits is of linear layers.
#[test]
fn inputs_of_convolutions_stay_float_where_tokens_are_rounded() {
    let device = Device::flex();
    let model = Own {
        conv: Conv2dConfig::new([4, 6], [3, 3]).init(&device),
        matrix: Param::from_tensor(Tensor::zeros([6, 8], &device)),
    };
    let model = with_numbers(model, 5);
    let x = Tensor::<4>::random([24, 4, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    let preset: Preset = "w8a8".parse().unwrap();
    let done = OneShot::new(preset).compress(model, [x], |model, x| model.forward(x));
    let prepared = done.unwrap().prepare(Some(&Activations::new(8))).unwrap();
    let of_inputs = quantizers(&prepared.model)
        .into_iter()
        .filter(|one| one.site == Site::Input && one.quantizer.is_enabled());
    let paths: Vec<Option<String>> = of_inputs.map(|one| one.parameter).collect();
    assert!(!paths.contains(&Some("conv.weight".into())), "{paths:?}");
}

#[test]
fn what_is_on_no_grid_is_refused_with_the_model() {
    let device = Device::flex();
    let done = compressed("sparse-0.5", &device);
    let expected = parameters(&done.model);
    let refused = done.prepare(Some(&Activations::new(8))).unwrap_err();
    let (model, error) = refused.into_parts();
    assert_eq!(error, OneShotError::NothingOnAGrid { first: None });
    assert_eq!(parameters(&model), expected);
}
