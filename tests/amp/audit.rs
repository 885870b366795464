//! The audit finds what would go wrong.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{BatchNormConfig, LinearConfig, LstmConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, AutocastConfig, Fallback, Finding, KeptBecause, audit, full_precision,
};

use crate::model::{Mlp, bits};
use crate::support::each_device;

fn config(dtype: FloatDType) -> AutocastConfig {
    AutocastConfig::new(dtype).with_fallback(Fallback::Emulate)
}

#[test]
fn a_sound_model_passes_on_every_device() {
    each_device(|target| {
        for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            let model = Mlp::new(1, &target.device.clone().autodiff());
            let (model, autocast) = config(dtype).prepare(model).unwrap();
            let before = bits(&model);
            let audit = audit(&model, &autocast, |model, autocast, device| {
                let x = Tensor::<2>::ones([5, 6], device);
                autocast.forward(x, |x| model.forward(x)).mean()
            })
            .unwrap();
            audit.check().unwrap();
            assert!(audit.operations.iter().any(|op| op.name == "matmul"));
            assert!(audit.parameters.iter().all(|p| p.kept.is_none()));
            assert_eq!(bits(&model), before);
        }
    });
}

#[test]
fn a_mixed_matrix_product_is_found_with_the_parameter_path() {
    let model = Mlp::new(1, &Device::flex());
    // The second layer was not prepared: its weight is F32, its input half.
    let (model, autocast) = config(FloatDType::F16)
        .with_full_precision(Some(burn::module::ParamGroup::from_predicate("second")))
        .prepare(model)
        .unwrap();
    let audit = audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<2>::ones([5, 6], device);
        autocast.forward(x, |x| model.forward(x))
    })
    .unwrap();
    let error = audit.check().unwrap_err();
    let AmpError::UnsoundOperation {
        operation, finding, ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(*finding, Finding::MixedDtypes);
    assert!(operation.contains("second.weight"), "{operation}");
    assert!(error.to_string().contains("full_precision"), "{error}");
}

#[test]
fn mixed_dtypes_in_a_users_forward_are_found_where_burn_stops() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let audit = audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<2>::ones([5, 6], device);
        // A constant at the device's default dtype.
        autocast.forward(x, |x| model.forward(x) + Tensor::<2>::ones([5, 3], device))
    })
    .unwrap();
    assert!(audit.stopped.is_some());
    assert!(matches!(
        audit.check(),
        Err(AmpError::UnsoundOperation {
            finding: Finding::MixedDtypes,
            ..
        })
    ));
}

#[test]
fn a_recurrent_layer_outside_of_a_region_is_found_and_inside_passes() {
    let model = LstmConfig::new(4, 4, true).init(&Device::flex());
    let (model, autocast) = config(FloatDType::BF16)
        .prepare((model, LinearConfig::new(4, 4).init(&Device::flex())))
        .unwrap();
    let run = |region: bool| {
        audit(&model, &autocast, |model, autocast, device| {
            let x = Tensor::<3>::ones([2, 3, 4], device);
            autocast.forward(x, |x| {
                let x = model.1.forward(x);
                match region {
                    true => full_precision(x, |x| model.0.forward(x, None).0),
                    false => model.0.forward(x, None).0,
                }
            })
        })
        .unwrap()
    };
    assert!(run(false).check().is_err());
    let sound = run(true);
    sound.check().unwrap();
    assert!(
        sound
            .parameters
            .iter()
            .any(|p| p.kept == Some(KeptBecause::Recurrent))
    );
}

#[test]
fn a_panic_of_the_model_itself_is_an_error() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let error = audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<2>::ones([5, 6], device);
        autocast.forward(x, |x| model.forward(x));
        panic!("a bug in the model")
    })
    .unwrap_err();
    assert!(error.to_string().contains("a bug in the model"), "{error}");
}

#[test]
fn running_statistics_of_the_audited_model_stay_where_they_are() {
    let device = Device::flex();
    let model = (
        BatchNormConfig::new(3).init(&device),
        LinearConfig::new(2, 2).init(&device),
    );
    let (model, autocast) = config(FloatDType::F16).prepare(model).unwrap();
    audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<3>::ones([2, 3, 4], device);
        autocast.forward(x, |x| full_precision(x, |x| model.0.forward(x)))
    })
    .unwrap();
    assert_eq!(model.devices(), [device]);
    assert_eq!(model.0.running_mean.value().dims(), [3]);
}

#[test]
fn an_attention_block_holds_well_under_the_bytes_of_f32() {
    let model: MultiHeadAttention = MultiHeadAttentionConfig::new(64, 4).init(&Device::flex());
    let (model, autocast) = config(FloatDType::F16).prepare(model).unwrap();
    let audit = audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<3>::ones([8, 128, 64], device);
        autocast.forward(x, |x| model.forward(MhaInput::self_attn(x)).context)
    })
    .unwrap();
    let memory = audit.memory;
    assert_eq!(memory.master_weights, 4 * (64 * 64 + 64) * 4);
    // Two of them are matrices that autodiff keeps in half; biases are added, not kept.
    assert_eq!(memory.cast_weights, 4 * 64 * 64 * 2);
    assert_eq!(memory.activations * 2, memory.activations_f32);
    assert!(memory.ratio() < 0.6, "{memory:?}");
    let softmax = audit
        .operations
        .iter()
        .find(|op| op.name == "softmax")
        .unwrap();
    assert_eq!(softmax.inputs, [DType::F16]);
    assert_eq!(softmax.findings, [Finding::LosesPrecision]);
}

#[test]
fn the_report_reads_as_a_table_and_survives_serde() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let audit = audit(&model, &autocast, |model, autocast, device| {
        let x = Tensor::<2>::ones([5, 6], device);
        autocast.forward(x, |x| model.forward(x).exp()).sum()
    })
    .unwrap();
    let text = audit.to_string();
    assert!(
        text.contains("matmul") && text.contains("MayOverflow"),
        "{text}"
    );
    let json = serde_json::to_string(&audit).unwrap();
    let back: burn_lean::amp::Audit = serde_json::from_str(&json).unwrap();
    assert_eq!(back, audit);
}

#[test]
fn numbers_that_f16_does_not_have_are_found() {
    let found = |dtype| {
        let (model, autocast) = config(dtype).prepare(Mlp::new(1, &Device::flex())).unwrap();
        let audit = audit(&model, &autocast, |model, autocast, device| {
            let x = Tensor::<2>::ones([5, 6], device);
            autocast.forward(x, |x| {
                let y = model.forward(x);
                let mask = y.clone().lower_elem(0.5);
                (y.clone().mask_fill(mask, -1e9), y.clone() + 1e-8, y + 0.5)
            })
        });
        let operations = audit.unwrap().operations;
        let names = operations.into_iter().filter_map(|operation| {
            let found = operation.findings.contains(&Finding::ConstantOutOfRange);
            found.then_some(operation.name)
        });
        names.collect::<Vec<_>>()
    };
    assert_eq!(found(FloatDType::F16), ["mask_fill", "add_scalar"]);
    assert_eq!(found(FloatDType::BF16), [""; 0]);
}

#[test]
fn a_panic_of_the_model_is_not_taken_for_mixed_dtypes() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let error = audit(&model, &autocast, |_, _, _| -> () {
        panic!("no dtype is configured for this DType table")
    })
    .unwrap_err();
    let AmpError::Audit { reason, .. } = &error else {
        panic!("{error}");
    };
    assert!(reason.contains("no dtype is configured"), "{reason}");
}
