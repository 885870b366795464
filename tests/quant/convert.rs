//! From fake-quantized to quantized weights, into records and files and back.

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::store::ModuleRecord;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, Mapping, NumberFormat, QatConfig, QuantError, Schedule, Unsupported,
    WeightConfig, compare, deploy::Outcome, load_safetensors, module::map_quantizers,
    quantized_weights, quantizers, save_safetensors,
};

use crate::support::{each_device, scratch, tensor, values};

/// Two linear layers, one of which sees three axes, and something that is never quantized.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) fc1: Linear,
    pub(crate) norm: BatchNorm,
    pub(crate) fc2: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        let linear = |seed: u64, shape: [usize; 2]| Linear {
            weight: Param::from_tensor(tensor(seed, shape, device)),
            bias: Some(Param::from_tensor(tensor(seed + 1, [shape[1]], device))),
        };
        Self {
            fc1: linear(1, [16, 32]),
            norm: BatchNormConfig::new(5).init(device),
            fc2: linear(3, [32, 8]),
        }
    }

    /// `[batch, 5, 16]` to `[batch, 5, 8]`.
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.norm.forward(self.fc1.forward_q(x));
        self.fc2.forward_q(relu(x))
    }
}

pub(crate) fn full(bits: u8) -> QatConfig {
    QatConfig::new().with_weight(WeightConfig::int(bits))
}

pub(crate) fn weight_only(bits: u8) -> QatConfig {
    full(bits).with_activation(None)
}

pub(crate) fn samples(device: &Device) -> Vec<Tensor<3>> {
    (0..3).map(|i| tensor(20 + i, [4, 5, 16], device)).collect()
}

/// Prepared and, on an autodiff device, run once so that every quantizer has a range.
pub(crate) fn prepared(config: QatConfig, device: &Device) -> Net {
    let training = device.clone().autodiff();
    let net = config.prepare(Net::new(&training)).unwrap();
    for sample in samples(&training) {
        net.forward(sample);
    }
    net.valid()
}

#[test]
fn converted_weights_are_the_fake_quantized_ones_to_the_bit() {
    each_device(|target| {
        for bits in [8, 6, 4, 3, 2] {
            let net = prepared(full(bits), &target.device);
            let expected = [values(net.fc1.weight.val()), values(net.fc2.weight.val())];
            let (converted, report) = ConvertConfig::new().convert(net).unwrap();
            assert_matches!(converted.fc1.weight.base().dtype(), DType::QFloat(_));
            assert_eq!(
                values(converted.fc1.weight.base().dequantize()),
                expected[0]
            );
            assert_eq!(
                values(converted.fc2.weight.base().dequantize()),
                expected[1]
            );
            let paths: Vec<&str> = report.weights.iter().map(|w| w.path.as_str()).collect();
            assert_eq!(paths, ["fc1.weight", "fc2.weight"]);
            assert!(report.ratio() < 0.6, "{}", report.ratio());
        }
    });
}

#[test]
fn a_converted_model_gives_the_codes_of_the_fake_quantized_one() {
    each_device(|target| {
        for bits in [8, 4, 2] {
            let net = prepared(full(bits), &target.device);
            let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
            compare(
                &mut report,
                &net,
                &converted,
                samples(&target.device),
                |net, x| net.forward(x.clone()),
            )
            .unwrap();
            assert_eq!(report.weights.len(), 2, "{report}");
            for weight in &report.weights {
                let mismatch = weight.mismatch.unwrap();
                assert_eq!(mismatch.weight_codes, 0);
                assert_eq!(mismatch.activation_codes, Some(0), "{report}");
                assert_eq!(mismatch.differing, 0.0);
            }
            assert_eq!(report.output_difference, Some(0.0), "{report}");
        }
    });
}

#[test]
fn norms_biases_and_statistics_stay_float() {
    each_device(|target| {
        let net = prepared(full(8), &target.device);
        let (converted, report) = ConvertConfig::new().convert(net).unwrap();
        assert_eq!(converted.norm.gamma.base().dtype(), DType::F32);
        assert_eq!(converted.norm.running_var.value().dtype(), DType::F32);
        assert_eq!(converted.fc1.bias.unwrap().base().dtype(), DType::F32);
        // Weights of 512 and 256 elements; 40 bias and 4 · 5 norm values; quantizer state.
        assert!(report.other_bytes > 4 * (40 + 20));
        assert_eq!(report.float_bytes(), report.other_bytes + 4 * (512 + 256));
    });
}

#[test]
fn a_record_of_a_converted_model_loads_into_a_prepared_one() {
    each_device(|target| {
        let net = prepared(full(8), &target.device);
        let x = samples(&target.device).remove(0);
        let (converted, report) = ConvertConfig::new().convert(net.clone()).unwrap();
        let expected = values(converted.forward(x.clone()));
        let bytes = converted.into_record().into_bytes().unwrap();
        let float_bytes = net.clone().into_record().into_bytes().unwrap().len();
        assert!(bytes.len() < float_bytes);
        assert!(bytes.len() > report.bytes());

        let record = ModuleRecord::from_bytes(bytes).unwrap();
        let fresh = full(8).prepare(Net::new(&target.device)).unwrap();
        let loaded = fresh.load_record(record);
        assert_matches!(loaded.fc1.weight.base().dtype(), DType::QFloat(_));
        assert_eq!(values(loaded.forward(x)), expected);
        assert_eq!(
            quantized_weights(&loaded).unwrap(),
            quantized_weights(&net).unwrap()
        );
    });
}

#[test]
fn an_affine_weight_is_refused_or_stays_fake_quantized() {
    each_device(|target| {
        let weight = WeightConfig::new()
            .with_format(NumberFormat::int8())
            .with_mapping(Mapping::Affine);
        let config = full(8).with_weight(weight);
        let net = prepared(config.clone(), &target.device);
        let rejected = ConvertConfig::new().convert(net).unwrap_err();
        let error = rejected.error().to_string();
        assert!(error.starts_with("parameter `fc1.weight`: "), "{error}");
        assert_says!(error, "no zero point");
        let net = rejected.into_value();

        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (kept, report) = keep.convert(net.clone()).unwrap();
        assert_matches!(report.weights[0].outcome, Outcome::KeptFakeQuantized { .. });
        assert_says!(report, "stays fake-quantized");
        let x = samples(&target.device).remove(0);
        assert_eq!(values(kept.forward(x.clone())), values(net.forward(x)));

        // From its file, with the scale and the zero point that it had.
        let (_folder, path) = scratch("net.safetensors");
        save_safetensors(&kept, &path).unwrap();
        let fresh = config.prepare(Net::new(&target.device)).unwrap();
        let loaded = load_safetensors(fresh, &path).unwrap();
        let x = samples(&target.device).remove(0);
        assert_eq!(values(loaded.forward(x.clone())), values(net.forward(x)));
        assert_eq!(
            quantized_weights(&loaded).unwrap(),
            quantized_weights(&net).unwrap()
        );
    });
}

#[test]
fn conversion_needs_ranges_and_quantizers() {
    let device = Device::flex();
    let error = |net: Net| ConvertConfig::new().convert(net).unwrap_err().into_error();

    assert_matches!(error(Net::new(&device)), QuantError::NothingToConvert);

    let unobserved = full(8).prepare(Net::new(&device)).unwrap();
    let text = error(unobserved).to_string();
    assert_says!(text, "input of `fc1`", "no data was observed");

    let later = Schedule::new().with_quantize_from(100);
    let text = error(prepared(full(8).with_schedule(later), &device)).to_string();
    assert_says!(text, "`fc1.weight`", "does not quantize");
}

#[test]
fn a_switched_off_quantizer_is_not_converted() {
    let net = prepared(full(8), &Device::flex());
    let net = map_quantizers(net, |located| {
        let off = located.parameter.as_deref() == Some("fc1.weight");
        located.quantizer.with_enabled(!off)
    });
    let (converted, report) = ConvertConfig::new().convert(net).unwrap();
    assert_eq!(report.weights.len(), 1);
    assert_eq!(converted.fc1.weight.base().dtype(), DType::F32);
    assert_eq!(quantizers(&converted).len(), 4);
}

#[test]
fn reports_survive_json_and_print_every_weight() {
    let net = prepared(full(4), &Device::flex());
    let (converted, mut report) = ConvertConfig::new().convert(net.clone()).unwrap();
    let x = samples(&Device::flex());
    compare(&mut report, &net, &converted, x, |net, x| {
        net.forward(x.clone())
    })
    .unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(
        serde_json::from_str::<burn_lean::quant::ConversionReport>(&json).unwrap(),
        report
    );
    assert_says!(
        report,
        "fc1.weight",
        "fc2.weight",
        "Q4S Native",
        "INT4 narrow",
        "total"
    );
    let none: Vec<Tensor<3>> = Vec::new();
    let error = compare(&mut report, &net, &converted, none, |net, x| {
        net.forward(x.clone())
    });
    assert_matches!(error, Err(QuantError::NoData { .. }));
}
