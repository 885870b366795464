//! The audit finds what would go wrong.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig,
    PairwiseDistanceConfig,
};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor};
use burn_lean::amp::{
    AmpError, AutocastConfig, Fallback, audit,
    audit::{Audit, Finding},
    autocast::KeptBecause,
    full_precision,
};

use crate::model::{Mlp, bits};
use crate::support::{each_device, values};

fn ones(device: &Device) -> Tensor<2> {
    Tensor::ones([5, 6], device)
}

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
            let audit = audit(
                &model,
                &autocast,
                ones(&target.device),
                |model, autocast, x| autocast.forward(x, |x| model.forward(x)).mean(),
            )
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
    let audit = audit(
        &model,
        &autocast,
        ones(&Device::flex()),
        |model, autocast, x| autocast.forward(x, |x| model.forward(x)),
    )
    .unwrap();
    let error = audit.check().unwrap_err();
    let AmpError::UnsoundOperations { sites } = &error else {
        panic!("{error}");
    };
    assert_eq!(sites.len(), 1);
    assert_eq!(sites[0].finding, Finding::MixedDtypes);
    assert_eq!(sites[0].module.as_deref(), Some("second"));
    assert!(!sites[0].is_after);
    assert_says!(error, "full_precision");
}

#[test]
fn mixed_dtypes_in_a_users_forward_are_found_where_burn_stops() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let audit = audit(
        &model,
        &autocast,
        ones(&Device::flex()),
        |model, autocast, x| {
            autocast.forward(x, |x| {
                // A constant at the device's default dtype.
                let constant = Tensor::<2>::ones([5, 3], &x.device());
                model.forward(x) + constant
            })
        },
    )
    .unwrap();
    assert!(audit.stopped.is_some());
    assert_eq!(mixed(&audit), ["after `second`"]);
}

/// The places where dtypes mix.
fn mixed(audit: &Audit) -> Vec<String> {
    let sites = audit.call_sites().into_iter();
    let mixed = sites.filter(|site| site.finding == Finding::MixedDtypes);
    mixed
        .map(|site| {
            let text = site.to_string();
            text.split(" mixes").next().unwrap().to_string()
        })
        .collect()
}

/// Two kinds of modules that Burn cannot run in half, each twice, between layers that it can.
#[derive(Module, Debug)]
struct Several {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
    lstm: Lstm,
    third: Linear,
    last_norm: BatchNorm,
    lstms: Vec<Lstm>,
}

impl Several {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(4, 4).init(device);
        let norm = || BatchNormConfig::new(4).init(device);
        let lstm = || LstmConfig::new(4, 4, true).init(device);
        Self {
            first: linear(),
            norm: norm(),
            second: linear(),
            lstm: lstm(),
            third: linear(),
            last_norm: norm(),
            lstms: vec![lstm()],
        }
    }

    /// `in_region` says which of the four is called in full precision.
    fn forward(&self, x: Tensor<3>, in_region: [bool; 4]) -> Tensor<3> {
        fn call(
            wanted: bool,
            x: Tensor<3>,
            body: impl FnOnce(Tensor<3>) -> Tensor<3>,
        ) -> Tensor<3> {
            match wanted {
                true => full_precision(x, body),
                false => body(x),
            }
        }
        let norm = |norm: &BatchNorm, x: Tensor<3>| norm.forward(x.swap_dims(1, 2)).swap_dims(1, 2);
        let x = self.first.forward(x);
        let x = call(in_region[0], x, |x| norm(&self.norm, x));
        let x = self.second.forward(x);
        let x = call(in_region[1], x, |x| self.lstm.forward(x, None).0);
        let x = self.third.forward(x);
        let x = call(in_region[2], x, |x| norm(&self.last_norm, x));
        call(in_region[3], x, |x| self.lstms[0].forward(x, None).0)
    }
}

#[test]
fn all_calls_that_need_full_precision_are_named_in_one_run() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let (model, autocast) = config(dtype).prepare(Several::new(&device)).unwrap();
            let found = |in_region: [bool; 4]| {
                let x = Tensor::<3>::ones([2, 3, 4], &device);
                audit(&model, &autocast, x, |model, autocast, x| {
                    autocast.forward(x, |x| model.forward(x, in_region))
                })
                .unwrap()
            };
            let all = ["`norm`", "`lstm`", "`last_norm`", "`lstms.0`"];
            let error = found([false; 4]).check().unwrap_err().to_string();
            assert_eq!(mixed(&found([false; 4])), all, "{error}");
            for name in all {
                assert_says!(error, name);
            }
            assert_eq!(mixed(&found([true, false, true, false])), [all[1], all[3]]);
            assert_eq!(mixed(&found([true, false, true, true])), [all[1]]);
            found([true; 4]).check().unwrap();
        }
    }
}

#[test]
fn what_leaves_the_range_of_f16_is_named_with_the_magnitude_and_is_right() {
    #[derive(Module, Debug)]
    struct Net {
        scale: Linear,
    }
    let device = Device::flex().autodiff();
    let net = Net {
        scale: LinearConfig::new(4, 4).init(&device),
    };
    let (model, autocast) = config(FloatDType::F16).prepare(net).unwrap();
    type Op = fn(Tensor<2>) -> Tensor<2>;
    let cases: [(&str, Op, f64); 6] = [
        ("exp", |x| x.exp(), 11.09),
        // Burn makes a product of it.
        ("mul", |x| x.powi_scalar(2), 255.94),
        ("powf_scalar", |x| x.powf_scalar(1.5), 1625.0),
        ("mul", |x| x.clone() * x, 255.94),
        ("sum_dim", |x| x.sum_dim(1), 16376.0),
        // The gradient, -30,000/x², is a number of F16 on both sides of the bound.
        ("div", |x| x.clone().full_like(30_000.0) / x, 255.94),
    ];
    for (name, operation, bound) in cases {
        let x = Tensor::<2>::ones([5, 4], &device);
        let found = audit(&model, &autocast, x, |model, autocast, x| {
            autocast.forward(x, |x| operation(model.scale.forward(x)))
        })
        .unwrap();
        let site = found.call_sites().into_iter();
        let site = site
            .filter(|site| site.finding == Finding::MayOverflow)
            .find(|site| site.operations.iter().any(|known| known == name))
            .unwrap_or_else(|| panic!("{name}: {found}"));
        assert_eq!(site.module.as_deref(), Some("scale"));
        let found = site.overflows_from.unwrap();
        assert!((found / bound - 1.0).abs() < 1e-3, "{name}: {found}");
        // Below it, value and gradient are those of F32; above it, they are not.
        for (magnitude, is_right) in [(found * 0.98, true), (found * 1.02, false)] {
            let value = |dtype: FloatDType| {
                let x = Tensor::<2>::full([5, 4], magnitude, &device)
                    .cast(dtype)
                    .require_grad();
                let y = operation(x.clone());
                let grads = y.clone().cast(FloatDType::F32).sum().backward();
                let gradient = x.grad(&grads).unwrap().cast(FloatDType::F32);
                let numbers = [y.inner().cast(FloatDType::F32).max(), gradient.max()];
                numbers.map(|number| f64::from(number.into_scalar::<f32>()))
            };
            let exact = value(FloatDType::F32);
            let half = value(FloatDType::F16);
            let close = |a: f64, b: f64| (a - b).abs() <= 0.02 * b.abs();
            let right = half.iter().zip(exact).all(|(a, b)| close(*a, b));
            assert_eq!(right, is_right, "{name} at {magnitude}: {half:?} {exact:?}");
        }
    }
}

#[test]
fn a_recurrent_layer_outside_of_a_region_is_found_and_inside_passes() {
    let model = LstmConfig::new(4, 4, true).init(&Device::flex());
    let (model, autocast) = config(FloatDType::BF16)
        .prepare((model, LinearConfig::new(4, 4).init(&Device::flex())))
        .unwrap();
    let run = |region: bool| {
        let x = Tensor::<3>::ones([2, 3, 4], &Device::flex());
        audit(&model, &autocast, x, |model, autocast, x| {
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
    assert_matches!(run(false).check(), Err(AmpError::UnsoundOperations { .. }));
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
fn an_embedding_whose_gradients_are_summed_in_half_is_named() {
    let device = Device::flex().autodiff();
    let model = (
        EmbeddingConfig::new(3, 4).init(&device),
        LinearConfig::new(4, 2).init(&device),
    );
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        let (model, autocast) = config(dtype).prepare(model.clone()).unwrap();
        let found = |in_region: bool| {
            let tokens = Tensor::<2, Int>::zeros([1, 4096], &device);
            let audit = audit(&model, &autocast, tokens, |model, autocast, tokens| {
                autocast.forward(tokens, |tokens| {
                    let x = match in_region {
                        true => full_precision(tokens, |tokens| model.0.forward(tokens)),
                        false => model.0.forward(tokens),
                    };
                    model.1.forward(x)
                })
            });
            let audit = audit.unwrap();
            let sites = audit.call_sites().into_iter();
            let named = sites.filter(|site| !site.summed_in_half.is_empty());
            let named: Vec<String> = named.map(|site| site.to_string()).collect();
            let text = audit.to_string();
            assert!(named.iter().all(|site| text.contains(site)), "{text}");
            named
        };
        assert_eq!(
            found(false),
            [
                "`0` loses precision (embedding): the gradients of `0.weight` are summed in half \
              precision; call it in `full_precision`, or use `Autocast::run`"
            ]
        );
        assert_eq!(found(true), [""; 0]);
    }
}

#[test]
fn what_half_precision_adds_up_one_by_one_or_rounds_is_named() {
    let model = LinearConfig::new(1, 1).init(&Device::flex());
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        let (model, autocast) = config(dtype).prepare(model.clone()).unwrap();
        let input = (
            Tensor::<2>::ones([4096, 1], &Device::flex()),
            Tensor::<1, Int>::zeros([4096], &Device::flex()),
        );
        let found = audit(&model, &autocast, input, |model, autocast, input| {
            autocast.forward(input, |(x, indices)| {
                let edges = model.forward(x);
                let nodes = edges.clone().slice([0..1]);
                let sums =
                    nodes.select_assign(0, indices.clone(), edges.clone(), IndexingUpdateOp::Add);
                let looked_up = edges.clone().select(0, indices);
                (sums, looked_up, edges.clone().cummax(0), edges.floor())
            })
        });
        let operations = found.unwrap().operations;
        let named = operations.iter().filter(|operation| {
            let findings = &operation.findings;
            findings.contains(&Finding::LosesPrecision)
        });
        let named: Vec<&str> = named.map(|operation| operation.name.as_str()).collect();
        assert_eq!(named, ["select_assign", "select", "cummax", "floor"]);
    }
}

#[test]
fn running_statistics_of_the_audited_model_stay_where_they_are() {
    let device = Device::flex();
    let model = (
        BatchNormConfig::new(3).init(&device),
        LinearConfig::new(2, 2).init(&device),
    );
    let (model, autocast) = config(FloatDType::F16).prepare(model).unwrap();
    let x = Tensor::<3>::ones([2, 3, 4], &device);
    audit(&model, &autocast, x, |model, autocast, x| {
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
    let x = Tensor::<3>::ones([8, 128, 64], &Device::flex());
    let audit = audit(&model, &autocast, x, |model, autocast, x| {
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
    let x = ones(&Device::flex());
    let audit = audit(&model, &autocast, x, |model, autocast, x| {
        autocast.forward(x, |x| model.forward(x).exp()).sum()
    })
    .unwrap();
    assert_says!(audit, "matmul", "MayOverflow");
    let json = serde_json::to_string(&audit).unwrap();
    let back: burn_lean::amp::audit::Audit = serde_json::from_str(&json).unwrap();
    assert_eq!(back, audit);
}

#[test]
fn numbers_that_f16_does_not_have_are_found() {
    let found = |dtype| {
        let (model, autocast) = config(dtype).prepare(Mlp::new(1, &Device::flex())).unwrap();
        let x = ones(&Device::flex());
        let audit = audit(&model, &autocast, x, |model, autocast, x| {
            autocast.forward(x, |x| {
                let y = model.forward(x);
                let mask = y.clone().lower_elem(0.5);
                let masked = y.clone().mask_fill(mask, -1e9);
                let positive = (y.clone() + 1e-8, y.clone().clamp_min(1e-8));
                (masked, positive, y.clone() + 0.5, y.clamp_min(0.5))
            })
        });
        let operations = audit.unwrap().operations;
        let names = operations.into_iter().filter_map(|operation| {
            let found = operation.findings.contains(&Finding::ConstantOutOfRange);
            found.then_some(operation.name)
        });
        names.collect::<Vec<_>>()
    };
    assert_eq!(
        found(FloatDType::F16),
        ["mask_fill", "add_scalar", "clamp_min"]
    );
    assert_eq!(found(FloatDType::BF16), [""; 0]);
}

#[test]
fn a_panic_of_the_model_is_not_taken_for_mixed_dtypes() {
    let (model, autocast) = config(FloatDType::F16)
        .prepare(Mlp::new(1, &Device::flex()))
        .unwrap();
    let error = audit(&model, &autocast, (), |_, _, ()| -> () {
        panic!("no dtype is configured for this DType table")
    })
    .unwrap_err();
    let AmpError::Audit { reason, .. } = &error else {
        panic!("{error}");
    };
    assert_says!(reason, "no dtype is configured");
}

/// What is kept is what a view looks at, however large the view is.
#[test]
fn an_expanded_activation_counts_as_it_is_stored() {
    let model = LinearConfig::new(4, 1).init(&Device::flex());
    let (model, autocast) = config(FloatDType::F16).prepare(model).unwrap();
    let activations = |width: usize| {
        let x = Tensor::<2>::ones([8, 4], &Device::flex());
        let audit = audit(&model, &autocast, x, |model, autocast, x| {
            autocast.forward(x, |x| {
                let wide = model.forward(x).tanh().expand([8, width]);
                (wide.clone() * wide).sum()
            })
        });
        audit.unwrap().memory.activations_f32
    };
    assert_eq!(activations(64), activations(1));
}

#[test]
fn a_sum_of_squares_leaves_the_range_before_its_squares_do() {
    let device = Device::flex();
    let layer = LinearConfig::new(4, 8).init(&device);
    let (model, autocast) = config(FloatDType::F16).prepare(layer).unwrap();
    let distance = PairwiseDistanceConfig::new().init();
    let x = Tensor::<2>::ones([5, 4], &device);
    let found = audit(&model, &autocast, x, |model, autocast, x| {
        autocast.forward(x, |x| {
            let y = model.forward(x);
            distance.forward(y.clone(), y * 0.0)
        })
    });
    let sites = found.unwrap().call_sites().into_iter();
    let sites = sites.filter(|site| site.finding == Finding::MayOverflow);
    let bounds = sites.filter_map(|site| site.overflows_from);
    let bound = bounds.fold(f64::INFINITY, f64::min);
    assert!((bound - 90.49).abs() < 0.01, "{bound}");
    for (magnitude, is_right) in [(bound * 0.98, true), (bound * 1.02, false)] {
        let x = Tensor::<2>::full([5, 8], magnitude, &device).cast(FloatDType::F16);
        let found = distance.forward(x.clone(), x.zeros_like());
        let found = values(found.cast(FloatDType::F32));
        assert!(
            found.iter().all(|one| one.is_finite() == is_right),
            "{found:?}"
        );
    }
}

#[test]
fn a_sigmoid_in_half_precision_is_named() {
    let layer = LinearConfig::new(6, 4).init(&Device::flex());
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        let (model, autocast) = config(dtype).prepare(layer.clone()).unwrap();
        let x = ones(&Device::flex());
        let found = audit(&model, &autocast, x, |model, autocast, x| {
            autocast.forward(x, |x| sigmoid(model.forward(x)))
        });
        let operations = found.unwrap().operations;
        let sigmoid = operations.iter().find(|one| one.name == "sigmoid").unwrap();
        assert_eq!(sigmoid.findings, [Finding::LosesPrecision]);
    }
}
