//! Weights stored in half precision: their bytes, their numbers, their file, and what stays F32.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, PaddingConfig1d,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_lean::amp::{AmpError, Autocast, AutocastConfig, Fallback, materialize_half};
use burn_lean::graph::record;
use burn_lean::quant::{QuantError, load_safetensors, save_safetensors};
use burn_lean::reparam::each_float;

use crate::model::{Mlp, Normalized, bits};
use crate::support::{each_device, parameters, tensor, values, with_numbers};

/// With the half precision that the device has, or that it emulates.
fn half<M: Module>(model: M, dtype: FloatDType) -> (M, Autocast) {
    let config = AutocastConfig::new(dtype).with_fallback(Fallback::Emulate);
    config.materialize_half(model).unwrap()
}

/// Path, dtype and bytes of every float tensor.
fn tensors<M: Module>(model: &M) -> Vec<(String, DType, usize)> {
    let mut found = Vec::new();
    each_float(model, |at, float| {
        let bytes = float.shape().iter().product::<usize>() * float.dtype().size();
        found.push((at.path(), float.dtype(), bytes));
    });
    found
}

fn bytes<M: Module>(model: &M) -> usize {
    tensors(model).iter().map(|(_, _, bytes)| bytes).sum()
}

/// The outputs of the network and how far they may be from it where inputs, weights, every product,
/// every partial sum and every output are rounded to numbers of unit roundoff `u`.
fn bounded(model: &Mlp, x: &Tensor<2>, u: f32) -> Vec<(f32, f32)> {
    let floats = parameters(model);
    let of = |path: &str| {
        let found = floats.iter().find(|one| one.path == path);
        found.unwrap().values.clone()
    };
    let layer = |input: &[(f32, f32)], name: &str, outputs: usize| -> Vec<(f32, f32)> {
        let (weight, bias) = (of(&format!("{name}.weight")), of(&format!("{name}.bias")));
        // Roundings of weight and input, of the product, of as many sums, and of the result.
        let count = input.len() as f32 + 5.0;
        let gamma = count * u / (1.0 - count * u);
        let all = (0..outputs).map(|j| {
            let (mut value, mut size, mut error) = (bias[j], bias[j].abs(), 0.0);
            for (k, (x, off)) in input.iter().enumerate() {
                let w = weight[k * outputs + j];
                value += w * x;
                size += (w * x).abs() + w.abs() * off;
                error += w.abs() * off;
            }
            (value, error + gamma * size)
        });
        all.collect()
    };
    let rows = values(x.clone());
    let mut found = Vec::new();
    for row in rows.chunks(6) {
        let input: Vec<(f32, f32)> = row.iter().map(|x| (*x, x.abs() * u)).collect();
        let hidden = layer(&input, "first", 8).into_iter();
        let hidden: Vec<(f32, f32)> = hidden.map(|(x, off)| (x.max(0.0), off)).collect();
        found.extend(layer(&hidden, "second", 3));
    }
    found
}

#[test]
fn the_weights_take_half_and_the_outputs_are_within_the_bound_of_rounding() {
    each_device(|target| {
        for (dtype, u) in [
            (FloatDType::F16, f32::powi(2.0, -11)),
            (FloatDType::BF16, f32::powi(2.0, -8)),
        ] {
            let native = target.device.supports_dtype(dtype);
            if !native && target.is_gpu() {
                continue;
            }
            let model = Mlp::new(1, &target.device);
            let x = tensor::<2>(3, [4, 6], &target.device);
            let expected = bounded(&model, &x, u);
            let full = bytes(&model);
            let (small, autocast) = half(model, dtype);
            if native {
                assert_eq!(bytes(&small), full / 2);
            }
            let found = values(autocast.forward(x, |x| small.forward(x)));
            let mut differ = false;
            for (found, (expected, bound)) in found.iter().zip(expected) {
                let off = (found - expected).abs();
                assert!(off <= bound, "{off} of {bound}");
                differ |= off > 0.0;
            }
            assert!(differ, "nothing was rounded");
        }
    });
}

#[test]
fn a_call_casts_its_input_and_no_weight() {
    let device = Device::flex();
    let x = tensor::<2>(3, [4, 6], &device);
    let casts = |model: &Mlp, autocast: &Autocast| -> Vec<usize> {
        let recording = record(model, &x, |model, x| {
            autocast.forward(x, |x| model.forward(x))
        });
        let recording = recording.unwrap();
        let nodes = recording.graph().nodes();
        let casts = nodes.filter(|node| node.name() == "cast");
        casts.map(|node| node.parameters().count()).collect()
    };
    let (prepared, autocast) = AutocastConfig::new(FloatDType::F16)
        .prepare(Mlp::new(1, &device))
        .unwrap();
    // Two weights and two biases, the input and the output.
    let of_weights = casts(&prepared, &autocast).into_iter().filter(|n| *n == 1);
    assert!(of_weights.count() >= 4);
    let (small, autocast) = materialize_half(prepared, FloatDType::F16).unwrap();
    let found = casts(&small, &autocast);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn a_file_holds_half_the_bytes_and_gives_the_same_outputs() {
    each_device(|target| {
        if !target.device.supports_dtype(FloatDType::F16) {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("half.safetensors");
        let large = Linear8::new(1, &target.device);
        let full = save_safetensors(&large, folder.path().join("full.safetensors")).unwrap();
        let (small, autocast) = half(large, FloatDType::F16);
        let size = save_safetensors(&small, &path).unwrap();
        assert!(size < full * 6 / 10, "{size} of {full}");

        let x = tensor::<2>(3, [4, 64], &target.device);
        let expected = values(autocast.forward(x.clone(), |x| small.forward(x)));
        // Into a model as it was written.
        let fresh = Linear8::new(2, &target.device);
        let loaded = load_safetensors(fresh, &path).unwrap();
        assert_eq!(tensors(&loaded), tensors(&small));
        let found = values(autocast.forward(x, |x| loaded.forward(x)));
        assert_eq!(found, expected);

        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 7]).unwrap();
        let fresh = Linear8::new(2, &target.device);
        let before = bits(&fresh);
        let (model, error) = load_safetensors(fresh, &path).unwrap_err().into_parts();
        assert_matches!(error, QuantError::File { .. });
        assert_eq!(bits(&model), before);
    });
}

/// Large enough that the header of a file does not count.
#[derive(Module, Debug)]
struct Linear8 {
    linear: Linear,
    norm: LayerNorm,
}

impl Linear8 {
    fn new(seed: u64, device: &Device) -> Self {
        let mut linear = LinearConfig::new(64, 32).init(device);
        linear.weight = Param::from_tensor(tensor(seed, [64, 32], device));
        Self {
            linear,
            norm: LayerNormConfig::new(32).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.norm.forward(self.linear.forward(x))
    }
}

#[test]
fn batch_norms_and_what_was_asked_for_stay_f32_and_run_takes_the_model_unedited() {
    let device = Device::flex();
    let model = Normalized::new(&device);
    let x = tensor::<2>(3, [4, 6], &device);
    let autocast = Autocast::new(FloatDType::F16);
    let expected = autocast.run(&model, x.clone(), |model, x| model.forward(x));
    let (small, _) = materialize_half(model, FloatDType::F16).unwrap();
    for (path, dtype, _) in tensors(&small) {
        let expected = match path.starts_with("norm") {
            true => DType::F32,
            false => DType::F16,
        };
        assert_eq!(dtype, expected, "{path}");
    }
    let found = autocast.run(&small, x, |model, x| model.forward(x));
    assert_eq!(values(found.unwrap()), values(expected.unwrap()));

    let model = Mlp::new(1, &device);
    let config = AutocastConfig::new(FloatDType::BF16);
    let group = ParamGroup::from_predicate("second");
    let config = config.with_full_precision(Some(group));
    let (small, _) = config.materialize_half(model).unwrap();
    assert_eq!(small.first.weight.base().dtype(), DType::BF16);
    assert_eq!(small.second.weight.base().dtype(), DType::F32);
}

#[test]
fn a_model_in_two_half_dtypes_is_refused_with_the_other_one() {
    let mut model = Mlp::new(1, &Device::flex());
    model.first.weight = model.first.weight.map(|w| w.cast(FloatDType::BF16));
    model.second.weight = model.second.weight.map(|w| w.cast(FloatDType::F16));
    for (dtype, path, other) in [
        (FloatDType::BF16, "second.weight", DType::F16),
        (FloatDType::F16, "first.weight", DType::BF16),
    ] {
        let rejected = materialize_half(model.clone(), dtype).unwrap_err();
        let expected = AmpError::ParameterDtype {
            path: path.into(),
            dtype: other,
        };
        assert_eq!(*rejected.error(), expected);
    }
}

#[test]
fn what_half_precision_cannot_hold_is_refused_and_the_model_comes_back() {
    let device = Device::flex();
    let mut model = Mlp::new(1, &device);
    model.second.weight = model.second.weight.map(|weight| weight * 0.0 - 65_520.0);
    let before = bits(&model);
    let rejected = materialize_half(model, FloatDType::F16).unwrap_err();
    let (model, error) = rejected.into_parts();
    let expected = AmpError::HalfRange {
        path: "second.weight".into(),
        largest: 65_520.0,
    };
    assert_eq!(error, expected);
    assert_says!(error, "use BF16");
    assert_eq!(bits(&model), before);
    let (model, _) = materialize_half(model, FloatDType::BF16).unwrap();
    // It is BF16 now: again changes nothing, and F16 would round twice.
    let (model, _) = materialize_half(model, FloatDType::BF16).unwrap();
    let error = materialize_half(model, FloatDType::F16).unwrap_err();
    assert_matches!(error.error(), AmpError::ParameterDtype { .. });
    let error = materialize_half(Mlp::new(1, &device), FloatDType::F64).unwrap_err();
    assert_matches!(error.error(), AmpError::NotAComputeDtype { .. });
    each_device(|target| {
        if target.name == "ndarray" {
            let rejected = materialize_half(Mlp::new(1, &target.device), FloatDType::F16);
            let (_, error) = rejected.unwrap_err().into_parts();
            assert_matches!(error, AmpError::UnsupportedDtype { .. });
        }
    });
}

/// What stands behind one another in a model, and what its weights meet.
#[derive(Module, Debug)]
struct Several {
    table: Embedding,
    positions: Param<Tensor<3>>,
    norm: LayerNorm,
    attention: MultiHeadAttention,
    conv: Conv1d,
    batch_norm: BatchNorm,
    head: Linear,
}

impl Several {
    fn new(device: &Device) -> Self {
        let model = Self {
            table: EmbeddingConfig::new(5, 8).init(device),
            positions: Param::from_tensor(Tensor::zeros([1, 4, 8], device)),
            norm: LayerNormConfig::new(8).init(device),
            attention: MultiHeadAttentionConfig::new(8, 2)
                .with_dropout(0.0)
                .init(device),
            conv: Conv1dConfig::new(8, 8, 3)
                .with_padding(PaddingConfig1d::Explicit(1, 1))
                .init(device),
            batch_norm: BatchNormConfig::new(8).init(device),
            head: LinearConfig::new(8, 3).init(device),
        };
        with_numbers(model, 4)
    }

    fn tokens(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.embedded(self.table.forward(tokens))
    }

    fn embedded(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x + self.positions.val();
        let normed = self.norm.forward(x.clone());
        let x = x + self.attention.forward(MhaInput::self_attn(normed)).context;
        let y = self.conv.forward(x.clone().swap_dims(1, 2));
        let x = x + self.batch_norm.forward(y).swap_dims(1, 2);
        self.head.forward(x)
    }
}

#[test]
fn run_takes_inputs_and_tables_in_either_dtype() {
    each_device(|target| {
        let model = Several::new(&target.device);
        let autocast = Autocast::new(FloatDType::F16).with_fallback(Fallback::Emulate);
        let (small, _) = half(model.clone(), FloatDType::F16);
        let tokens = Tensor::<2, Int>::from_ints([[0, 1, 2, 3], [4, 3, 2, 1]], &target.device);
        let by_token = |model: &Several| {
            let y = autocast.run(model, tokens.clone(), |model, x| model.tokens(x));
            values(y.unwrap())
        };
        let x = tensor::<3>(3, [2, 4, 8], &target.device);
        let by_vector = |model: &Several, x: Tensor<3>| {
            let y = autocast.run(model, x, |model, x| model.embedded(x));
            values(y.unwrap())
        };
        let expected = [by_token(&model), by_vector(&model, x.clone())];
        let mut found = vec![by_token(&small), by_vector(&small, x.clone())];
        if target.device.supports_dtype(FloatDType::F16) {
            found.push(by_vector(&small, x.cast(FloatDType::F16)));
        }
        for (index, found) in found.iter().enumerate() {
            let expected = &expected[index.min(1)];
            for (found, expected) in found.iter().zip(expected) {
                // Tables and inputs are rounded once more; numbers below 4 of 11 bits.
                let off = (found - expected).abs();
                assert!(off < 0.02, "{index}: {found}, {expected}");
            }
        }
    });
}
