//! What files say of activations.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, Learned, NumberFormat, ObserverConfig, PtqConfig, QatConfig,
    QuantError, QuantizedForward, Scheme, Site, load_safetensors, quantizers, save_safetensors,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::convert::{Net, full, prepared, samples};
use crate::files::sealed;
use crate::support::{each_device, scratch, tensor, values, with_numbers};

/// Affine codes of 8 bits.
fn activation(observer: ObserverConfig, learned: Learned) -> QatConfig {
    let scheme = Scheme::affine(NumberFormat::uint8());
    let config = FakeQuantizeConfig::new(scheme).with_observer(observer);
    full(4).with_activation(Some(config.with_learned(learned)))
}

/// The metadata, with the activations apart.
fn metadata(bytes: &[u8]) -> (HashMap<String, String>, BTreeMap<String, Value>) {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let activations = serde_json::from_str(&metadata["activations"]).unwrap();
    (metadata, activations)
}

/// The file with other metadata.
fn with(bytes: &[u8], metadata: HashMap<String, String>) -> Vec<u8> {
    sealed(&SafeTensors::deserialize(bytes).unwrap(), metadata)
}

fn load(config: &QatConfig, path: &Path, device: &Device) -> Result<Net, QuantError> {
    let fresh = config.prepare(Net::new(device)).unwrap();
    load_safetensors(fresh, path).map_err(|rejected| rejected.into_error())
}

fn outputs(net: &Net, device: &Device) -> Vec<f32> {
    values(net.forward(samples(device).remove(0)))
}

#[test]
fn the_metadata_says_scheme_scale_and_zero_point_and_nothing_observed_is_stored() {
    let (_folder, path) = scratch("net.safetensors");
    each_device(|target| {
        for config in [
            full(8),
            activation(ObserverConfig::MinMax, Learned::None),
            activation(ObserverConfig::MinMax, Learned::LsqPlus),
        ] {
            let net = prepared(config.clone(), &target.device);
            save_safetensors(&net, &path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let tensors = SafeTensors::deserialize(&bytes).unwrap();
            for name in tensors.names() {
                let is_state = name.contains(".observer.") || name.contains(".learned_");
                assert!(!is_state, "{name}");
            }
            let (metadata, mut activations) = metadata(&bytes);
            assert_eq!(metadata["version"], "4");
            let of_inputs = quantizers(&net).into_iter();
            let of_inputs = of_inputs.filter(|located| located.site != Site::Weight);
            for located in of_inputs {
                let found = activations.remove(&located.path).expect("an entry");
                let qparams = located.quantizer.qparams().unwrap();
                let numbers = |of| values(of).into_iter().map(f64::from).collect::<Vec<_>>();
                let scheme: Scheme = serde_json::from_value(found["scheme"].clone()).unwrap();
                assert_eq!(scheme, *located.quantizer.scheme());
                assert_eq!(found["scale"], json!(numbers(qparams.scale)));
                assert_eq!(found["zero_point"], json!(numbers(qparams.zero_point)));
            }
            assert!(activations.is_empty(), "{activations:?}");

            let loaded = load(&config, &path, &target.device).unwrap();
            let expected = outputs(&net, &target.device);
            assert_eq!(outputs(&loaded, &target.device), expected);
            // Written again it says the same.
            save_safetensors(&loaded, &path).unwrap();
            let again = std::fs::read(&path).unwrap();
            let said = |bytes: &[u8]| self::metadata(bytes).1;
            assert_eq!(said(&again), said(&bytes));
        }
    });
}

#[test]
fn a_dynamic_range_is_said_to_be_that_of_the_values_at_hand() {
    let (_folder, path) = scratch("net.safetensors");
    let device = Device::flex();
    let config = activation(ObserverConfig::Memoryless, Learned::None);
    let net = config.prepare(Net::new(&device)).unwrap().valid();
    save_safetensors(&net, &path).unwrap();
    let (_, activations) = metadata(&std::fs::read(&path).unwrap());
    assert!(!activations.is_empty());
    for found in activations.values() {
        let both = (&found["scale"], &found["zero_point"]);
        assert_eq!(both, (&json!([]), &json!([])));
    }
    let loaded = load(&config, &path, &device).unwrap();
    assert_eq!(outputs(&loaded, &device), outputs(&net, &device));
    // One that is to keep a range would have none.
    let keeps = activation(ObserverConfig::MinMax, Learned::None);
    assert_matches!(load(&keeps, &path, &device), Err(QuantError::File { .. }));
}

#[test]
fn what_has_no_range_yet_keeps_what_it_observed() {
    let (_folder, path) = scratch("net.safetensors");
    let device = Device::flex();
    let config = full(8);
    let net = config.prepare(Net::new(&device)).unwrap().valid();
    save_safetensors(&net, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(metadata(&bytes).1.is_empty());
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names().into_iter();
    assert!(names.any(|name| name.contains(".input.observer.")));
    let loaded = load(&config, &path, &device).unwrap();
    let mut all = quantizers(&loaded).into_iter();
    assert!(all.all(|located| located.site == Site::Weight || !located.quantizer.is_observed()));
}

#[test]
fn activations_that_no_quantizer_can_have_are_refused() {
    let (_folder, path) = scratch("net.safetensors");
    let device = Device::flex();
    let config = full(4);
    save_safetensors(&prepared(config.clone(), &device), &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let (metadata, activations) = metadata(&bytes);
    let (first, known) = activations.first_key_value().unwrap();
    let refused = |text: String| {
        let mut metadata = metadata.clone();
        metadata.insert("activations".into(), text);
        std::fs::write(&path, with(&bytes, metadata)).unwrap();
        load(&config, &path, &device).unwrap_err()
    };
    let changed = |field: &str, value: Value| {
        let mut activations = activations.clone();
        let mut entry = known.clone();
        entry[field] = value;
        activations.insert(first.clone(), entry);
        refused(json!(activations).to_string())
    };
    for (field, value) in [
        ("scale", json!([0.0])),
        ("scale", json!([-0.5])),
        ("scale", json!([1e300])),
        ("scale", json!([0.5, 0.5])),
        ("scale", json!([])),
        ("zero_point", json!([0.5])),
        ("zero_point", json!([1000.0])),
        ("zero_point", json!([])),
    ] {
        let error = changed(field, value.clone());
        let is_file = matches!(error, QuantError::File { .. });
        assert!(
            is_file && error.to_string().contains(first),
            "{field} {value}: {error}"
        );
    }
    // A model without quantizers has nothing to compare with.
    let mut three = activations.clone();
    let code = known["zero_point"][0].clone();
    let entry = three.get_mut(first).unwrap();
    entry["scale"] = json!([0.5, 0.5, 0.5]);
    entry["zero_point"] = json!([code, code, code]);
    let mut other = metadata.clone();
    other.insert("activations".into(), json!(three).to_string());
    std::fs::write(&path, with(&bytes, other)).unwrap();
    let rejected = load_safetensors(Net::new(&device), &path).unwrap_err();
    assert_says!(rejected.error(), "one number for a tensor");
    for value in [json!([null]), json!("0.5"), json!(null)] {
        assert_matches!(changed("scale", value), QuantError::File { .. });
    }
    let other = json!(Scheme::symmetric(NumberFormat::int(4)));
    let error = changed("scheme", other);
    assert_says!(error, "is INT4, symmetric, per tensor, not ");

    let mut more = activations.clone();
    more.insert("fc9.weight.quant.input".into(), known.clone());
    let error = refused(json!(more).to_string());
    assert_says!(error, "no quantizer for its `fc9");
    // Without its entry a quantizer has neither a range nor what it observed.
    let mut fewer = activations.clone();
    fewer.remove(first);
    let error = refused(json!(fewer).to_string());
    assert_says!(error, "is missing");
    assert_matches!(refused("nonsense".into()), QuantError::File { .. });
}

/// A process that knows the architecture and nothing of how it was quantized.
#[test]
fn a_model_without_quantizers_gets_those_of_the_file() {
    let (_folder, path) = scratch("net.safetensors");
    each_device(|target| {
        for config in [
            full(8),
            full(4),
            activation(ObserverConfig::Memoryless, Learned::None),
            activation(ObserverConfig::MinMax, Learned::LsqPlus),
        ] {
            let device = &target.device;
            save_safetensors(&prepared(config.clone(), device), &path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let known = load(&config, &path, device).unwrap();
            let plain = load_safetensors(Net::new(device), &path).unwrap();
            assert_eq!(outputs(&plain, device), outputs(&known, device));
            let places = |net: &Net| {
                let all = quantizers(net).into_iter();
                let all = all.map(|one| (one.path, one.quantizer.scheme().clone()));
                all.collect::<Vec<_>>()
            };
            assert_eq!(places(&plain), places(&known));
            // It is written as it was read.
            save_safetensors(&plain, &path).unwrap();
            let again = metadata(&std::fs::read(&path).unwrap());
            assert_eq!(again.1, metadata(&bytes).1);
            assert_eq!(again.0["quantized"], metadata(&bytes).0["quantized"]);
        }
    });
}

/// Of a layer that no pass calls, as of one whose input was always zero.
#[test]
fn an_activation_without_a_range_needs_a_prepared_model_and_the_error_says_so() {
    #[derive(Module, Debug)]
    struct Spare {
        used: Linear,
        spare: Linear,
    }
    let (_folder, path) = scratch("spare.safetensors");
    let device = Device::flex();
    let new = |device: &Device| {
        let layer = || LinearConfig::new(4, 4).init(device);
        let (used, spare) = (layer(), layer());
        with_numbers(Spare { used, spare }, 1)
    };
    let config = full(8);
    let training = device.clone().autodiff();
    let net = config.prepare(new(&training)).unwrap();
    net.used.forward_q(tensor::<2>(3, [8, 4], &training));
    save_safetensors(&net.valid(), &path).unwrap();
    let rejected = load_safetensors(new(&device), &path).unwrap_err();
    assert_says!(
        rejected.error(),
        "no quantizer for its `spare.weight.quant.input.control`",
        "has no range",
        "prepared as the saved one was"
    );
    load_safetensors(config.prepare(new(&device)).unwrap(), &path).unwrap();
}

/// Operands of attentions, sums and products have no layer of their own.
#[test]
fn quantizers_of_sites_are_at_their_places_again() {
    #[derive(Module, Debug)]
    struct Encoder {
        attention: MultiHeadAttention,
        norm: LayerNorm,
        fc: Linear,
    }
    let (_folder, path) = scratch("encoder.safetensors");
    let device = Device::flex();
    let new = |seed| {
        let attention = MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0);
        let encoder = Encoder {
            attention: attention.init(&device),
            norm: LayerNormConfig::new(8).init(&device),
            fc: LinearConfig::new(8, 8).init(&device),
        };
        with_numbers(encoder, seed)
    };
    let forward = |net: &Encoder, x: Tensor<3>| {
        let context = net
            .attention
            .forward(MhaInput::self_attn(x.clone()))
            .context;
        let x = net.norm.forward(x + context);
        x.clone() + net.fc.forward(x.clone()) * x
    };
    let x = tensor::<3>(5, [2, 4, 8], &device);
    let config = QatConfig::new().with_sums(true);
    let (net, _) = PtqConfig::new()
        .with_quantize(config)
        .quantize_for(new(1), || [x.clone()], forward)
        .unwrap();
    assert!(
        quantizers(&net)
            .iter()
            .any(|one| one.site == Site::Operation)
    );
    save_safetensors(&net, &path).unwrap();
    let loaded = load_safetensors(new(2), &path).unwrap();
    let run = |net: &Encoder| {
        let quantized = QuantizedForward::new();
        values(quantized.run(net, x.clone(), forward).unwrap())
    };
    assert_eq!(run(&loaded), run(&net));
    assert_ne!(run(&loaded), values(forward(&loaded, x.clone())));
}
