//! Quantization without edits: the same quantizers and numbers as with edited calls, and models that
//! no edit reaches.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_lean::amp::{Autocast, Fallback};
use burn_lean::graph::{Place, Role, Views};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, GptqConfig, GraphError, NumberFormat, ObserverConfig,
    PtqConfig, QatConfig, QuantError, QuantizedForward, Rounding, RoundingConfig, Schedule, Scheme,
    Unsupported, WeightConfig, advance, calibrate,
    module::{LayerInputs, map_quantizers},
    quantized_weights, quantizers,
};
use burn_lean::reparam::attach;

use crate::sites_models::{ConvNet, Decoder, Encoder, Net, Recurrent};
use crate::support::{
    each_device, gradients, on_each, on_tracked, parameters, tensor, values, with_numbers,
};

fn paths<M: Module>(model: &M) -> Vec<String> {
    let located = quantizers(model).into_iter();
    located.map(|located| located.path).collect()
}

/// Three steps of training by `loss`; parameters and everything that the quantizers remember.
fn trained<N: Net>(
    model: &N,
    device: &Device,
    loss: impl Fn(&N, N::Batch) -> Tensor<1>,
) -> (Vec<f32>, Vec<crate::support::Parameter>) {
    let mut model = model.clone();
    let mut optim = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..3 {
        let loss = loss(&model, N::batch(step, device));
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = advance(optim.step(0.05, model, grads));
    }
    // Statistics that wait for their next use are taken in.
    (losses, parameters(&model.valid()))
}

/// Both routes, from the same prepared model.
fn assert_both_routes<N: Net>(name: &str, new: impl Fn(&Device) -> N) {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let model = with_numbers(new(&device), 7);
        let model = QatConfig::new().with_outputs(true).prepare(model).unwrap();
        // A copy of its own: quantizers of clones are apart, running statistics are not.
        let other = QatConfig::new()
            .with_outputs(true)
            .prepare(with_numbers(new(&device), 7))
            .unwrap();
        let edited = trained(&other, &device, |model, batch| model.edited_loss(batch));
        let quantized = QuantizedForward::new();
        let run = |model: &N, batch| quantized.run(model, batch, |model, batch| model.loss(batch));
        let unedited = trained(&model, &device, |model, batch| run(model, batch).unwrap());
        let what = format!("{name} on {}", target.name);
        assert_eq!(unedited.0[0], edited.0[0], "first loss of {what}");
        assert_close(&unedited.0, &edited.0, &format!("losses of {what}"));
        assert_eq!(unedited.1.len(), edited.1.len());
        for (found, expected) in unedited.1.iter().zip(&edited.1) {
            assert_eq!(found.path, expected.path);
            let what = format!("{} of {what}", found.path);
            assert_close(&found.values, &expected.values, &what);
        }
        // They do not pass through.
        let float = with_numbers(new(&device), 7).loss(N::batch(0, &device));
        assert_ne!(unedited.0[0], float.into_scalar::<f32>(), "{what}");
    });
}

/// But for the order in which the gradients of several uses of a tensor are summed.
fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let close = (found - expected).abs() <= 1e-5 * expected.abs().max(0.1);
        assert!(close, "{what}: {found} for {expected}");
    }
}

#[test]
fn a_conv_net_trains_as_with_edited_calls() {
    assert_both_routes("conv net", ConvNet::new);
}

#[test]
fn an_lstm_trains_as_with_edited_calls() {
    assert_both_routes("lstm", Recurrent::new);
}

#[test]
fn a_transformer_trains_as_with_edited_calls() {
    assert_both_routes("transformer", Encoder::new);
}

#[test]
fn modules_with_private_fields_reach_weights_and_activations_of_8_bits() {
    on_each(|device| {
        let model = with_numbers(Decoder::new(device), 7);
        let x = Decoder::batch(1, device);
        let forward = |model: &Decoder, x: Tensor<3>| model.forward(x);
        let float = values(model.forward(x.clone()));
        let config = QatConfig::new().with_sums(true).with_activation(Some(
            FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()))
                .with_observer(ObserverConfig::MinMax),
        ));
        let model = config.prepare_for(model, x.clone(), forward).unwrap();
        assert_eq!(
            paths(&model),
            [
                "input.weight.quant.weight",
                "input.weight.quant.input",
                "block.wq.weight.quant.weight",
                "block.wq.weight.quant.input",
                "block.wq.weight.quant.attention",
                "block.wq.weight.quant.sites.query",
                "block.wk.weight.quant.weight",
                "block.wk.weight.quant.input",
                "block.wk.weight.quant.sites.key",
                "block.wv.weight.quant.weight",
                "block.wv.weight.quant.input",
                "block.wv.weight.quant.output",
                "block.mixing.quant.weight",
                "block.mixing.quant.input",
                "block.mixing.quant.sites.sum_left",
                "block.mixing.quant.sites.sum_right",
                "head.weight.quant.weight",
                "head.weight.quant.input",
            ]
        );
        let quantized = QuantizedForward::new();
        let model = quantized.calibrate(model, [x.clone()], forward).unwrap();
        let found = values(quantized.run(&model, x.clone(), forward).unwrap());
        let error: f32 = found.iter().zip(&float).map(|(a, b)| (a - b).powi(2)).sum();
        let power: f32 = float.iter().map(|a| a * a).sum();
        // Eight bits everywhere: more than 25 dB, and not the float numbers.
        assert!(error > 0.0);
        assert!(error < power * 10f32.powf(-2.5), "{} of {power}", error);
        // Every one of them matters.
        for path in paths(&model) {
            let without = map_quantizers(model.clone(), |located| {
                let on = located.path != path;
                located.quantizer.with_enabled(on)
            });
            let other = values(quantized.run(&without, x.clone(), forward).unwrap());
            assert_ne!(other, found, "{path}");
        }
        // Rows of `[out, in]`: one scale for each output.
        let all = quantizers(&model);
        let mixing = all
            .iter()
            .find(|one| one.path == "block.mixing.quant.weight");
        let scheme = mixing.unwrap().quantizer.scheme().to_string();
        assert_says!(scheme, "axis 0");

        // The operand of each site is one that a quantizer gives, and the converted model does the same.
        let recording = burn_lean::graph::record(&model, &x, forward).unwrap();
        let hooked = recording.graph().hooked_operands(|_| Views::OfNumbers);
        let edges: Vec<_> = recording
            .graph()
            .sites()
            .into_iter()
            .filter(|one| one.site.role != Role::Output)
            .collect();
        // Six weights with their inputs, queries, keys and their softmax, two branches. Values are
        // the output of a layer.
        assert_eq!(edges.len(), 17);
        for one in edges {
            let Place::Operand(operand) = one.place else {
                assert_eq!(one.site.role, Role::Probabilities);
                continue;
            };
            let found = hooked
                .iter()
                .any(|one_of| (one_of.0, one_of.1) == (one.node, operand));
            assert!(found, "{} at {operand} of {}", one.site, one.node);
        }
        assert_eq!(quantized_weights(&model).unwrap().len(), 6);
        let config = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        let (converted, _) = config.convert(model).unwrap();
        let after = values(quantized.run(&converted, x, forward).unwrap());
        assert_eq!(after, found);
    });
}

#[test]
fn autocast_runs_all_quantizers_in_half_precision() {
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        on_tracked(|device| {
            let model = with_numbers(ConvNet::new(&device), 7);
            let model = QatConfig::new().prepare(model).unwrap();
            let x = ConvNet::batch(1, &device);
            let autocast = Autocast::new(dtype).with_fallback(Fallback::Emulate);
            let forward = |model: &ConvNet, x| model.loss(x);
            let loss = autocast.run(&model, x.clone(), forward).unwrap();
            let all = quantizers(&model);
            assert!(all.iter().all(|located| located.quantizer.is_observed()));
            let exact = QuantizedForward::new().run(&model, x, forward).unwrap();
            let (found, expected) = (
                loss.clone().into_scalar::<f32>(),
                exact.into_scalar::<f32>(),
            );
            assert_ne!(found, expected);
            let error = (found - expected).abs() / expected;
            assert!(error < 0.1, "{error} in {dtype:?}");
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert_eq!(gradients(&model, grads).len(), 10);
        });
    }
}

#[test]
fn schedules_advance_by_themselves_and_once_with_advance() {
    let device = Device::flex().autodiff();
    let schedule = Schedule::new()
        .with_quantize_from(1)
        .with_freeze_observers_at(Some(2))
        .with_freeze_batch_norm_at(Some(3));
    let config = QatConfig::new().with_schedule(schedule);
    let mut model = config
        .prepare(with_numbers(ConvNet::new(&device), 7))
        .unwrap();
    let quantized = QuantizedForward::new();
    let run = |model: &ConvNet, seed| {
        let batch = ConvNet::batch(seed, &device);
        quantized.run(model, batch, |model, batch| model.loss(batch))
    };
    let steps = |model: &ConvNet| {
        let all = quantizers(model).into_iter();
        let mut steps: Vec<u64> = all.map(|located| located.quantizer.step()).collect();
        steps.dedup();
        steps
    };
    let statistics = |model: &ConvNet| {
        let all = parameters(model).into_iter();
        let of_norms = all.filter(|one| one.path.contains("running"));
        of_norms.map(|one| one.values).collect::<Vec<_>>()
    };
    run(&model, 0).unwrap();
    assert_eq!(steps(&model), [1]);
    model = advance(model);
    assert_eq!(steps(&model), [1], "counted once");
    run(&model, 1).unwrap();
    let range = parameters(&model);
    assert_eq!(steps(&model), [2]);
    // An evaluation is no step.
    let valid = model.valid();
    let x = ConvNet::batch(2, &device.clone().inner());
    quantized.run(&valid, x, |model, x| model.loss(x)).unwrap();
    assert_eq!((steps(&model), steps(&valid)), (vec![2], vec![2]));
    let before = statistics(&model);
    run(&model, 2).unwrap();
    assert_eq!(steps(&model), [3]);
    let observers = |all: &[crate::support::Parameter]| {
        let of_observers = all.iter().filter(|one| one.path.contains("observer"));
        of_observers.cloned().collect::<Vec<_>>()
    };
    assert_eq!(observers(&parameters(&model)), observers(&range), "frozen");
    let moved = statistics(&model);
    assert_ne!(moved, before);
    run(&model, 3).unwrap();
    assert_eq!(statistics(&model), moved, "batch normalization is frozen");
    let without = QuantizedForward::new().without_schedule();
    let batch = ConvNet::batch(4, &device);
    without
        .run(&model, batch, |model, x| model.loss(x))
        .unwrap();
    assert_eq!(steps(&model), [4]);
}

#[test]
fn records_of_both_routes_are_interchangeable() {
    let device = Device::flex().autodiff();
    let model = QatConfig::new().prepare(with_numbers(Encoder::new(&device), 7));
    let model = model.unwrap();
    let quantized = QuantizedForward::new();
    let x = Encoder::batch(1, &device);
    quantized
        .run(&model, x.clone(), |model, x| model.loss(x))
        .unwrap();
    let other = QatConfig::new().prepare(Encoder::new(&device)).unwrap();
    let other = other.load_record(model.clone().into_record());
    let valid = (model.valid(), other.valid());
    let x = Encoder::batch(2, &Device::flex());
    let found = quantized.run(&valid.0, x.clone(), |model, x| model.loss(x));
    let expected = valid.1.edited_loss(x);
    assert_eq!(values(found.unwrap()), values(expected));
}

#[test]
fn a_kept_recording_calls_the_quantizers_of_the_model_at_hand() {
    let device = Device::flex().autodiff();
    let model = with_numbers(ConvNet::new(&device), 7);
    let model = QatConfig::new().prepare(model).unwrap();
    let cached = QuantizedForward::new().cached();
    let kept = trained(&model, &device, |model, batch| {
        cached
            .run(model, batch, |model, batch| model.loss(batch))
            .unwrap()
    });
    let model = with_numbers(ConvNet::new(&device), 7);
    let model = QatConfig::new().prepare(model).unwrap();
    let anew = QuantizedForward::new();
    let expected = trained(&model, &device, |model, batch| {
        anew.run(model, batch, |model, batch| model.loss(batch))
            .unwrap()
    });
    assert_eq!(kept, expected);
}

#[test]
fn what_cannot_be_recorded_is_an_error_and_touches_nothing() {
    let device = Device::flex().autodiff();
    let model = QatConfig::new().prepare(LinearConfig::new(4, 3).init(&device));
    let model = model.unwrap();
    let before = parameters(&model);
    let quantized = QuantizedForward::new();
    let x = tensor::<2>(5, [6, 4], &device);
    let read = quantized.run(&model, x.clone(), |model, x| {
        let y = model.forward(x);
        y.clone() * y.max().into_scalar::<f32>()
    });
    let error = read.unwrap_err();
    assert_matches!(error, QuantError::Graph(GraphError::Forward { .. }));
    let otherwise = "`forward_q` (`#[quantize_calls]`) do without a recording";
    assert_says!(error, otherwise);
    let stopped = quantized.run(&model, x.clone(), |model, x| {
        let y = model.forward(x);
        (y.clone() * y.detach()).mean()
    });
    let error = stopped.unwrap_err();
    let is_stopped = matches!(error, QuantError::Graph(GraphError::StopsGradients { .. }));
    assert!(is_stopped, "{error}");
    assert_says!(error, otherwise);
    // What fails without a recording, too, is not to be called in another way.
    let misshapen = quantized.run(&model, x.clone(), |model, x| {
        model.forward(x.reshape([5, 5]))
    });
    let error = misshapen.unwrap_err();
    assert_matches!(error, QuantError::Graph(GraphError::Forward { .. }));
    assert!(!error.to_string().contains("forward_q"), "{error}");
    let nothing = quantized.run(&model, x.clone(), |model, x| {
        model.forward(x);
    });
    assert_eq!(
        nothing.unwrap_err(),
        QuantError::Graph(GraphError::NoResult)
    );
    assert_eq!(parameters(&model), before);
    // A calibration that fails gives the model back, and says why.
    let rejected = calibrate(model, |model| {
        quantized.run(model, x.clone().inner(), |model, x| {
            model.forward(x).into_scalar::<f32>().to_string()
        })
    });
    let (model, error) = rejected.unwrap_err().into_parts();
    assert_matches!(error, QuantError::Graph(_));
    assert_eq!(parameters(&model), before);
}

#[test]
fn inputs_of_layers_and_better_rounding_need_no_edits() {
    on_each(|device| {
        let model = with_numbers(ConvNet::new(device), 7);
        let model = QatConfig::new().prepare(model).unwrap();
        let quantized = QuantizedForward::new();
        let x = ConvNet::batch(1, device);
        let model = quantized
            .calibrate(model, [x.clone()], |model, x| model.logits(x))
            .unwrap();
        let run = |model: &ConvNet| quantized.run(model, x.clone(), |model, x| model.logits(x));
        let found = LayerInputs::collect(&model, run).unwrap();
        let edited = |model: &ConvNet| {
            model.edited_loss(x.clone());
        };
        let expected = LayerInputs::collect(&model, edited).unwrap();
        let paths: Vec<_> = expected.paths().collect();
        assert_eq!(paths, ["first.weight", "head.weight", "second.weight"]);
        assert_eq!(found.paths().collect::<Vec<_>>(), paths);
        for path in paths {
            let [found, expected] = [&found, &expected].map(|all| all.of(path).unwrap());
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!(found.mean(), expected.mean(), "{path}");
            }
        }
        // And through post-training quantization as a whole.
        let float = with_numbers(ConvNet::new(device), 7);
        let config = PtqConfig::new()
            .with_progress(false)
            .with_rounding(RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new())));
        let batches = || [x.clone()];
        let (by_run, _) = config
            .quantize(float.clone(), batches, |model, x| {
                quantized.run(model, x, |model, x| model.logits(x))
            })
            .unwrap();
        let (by_edits, _) = config
            .quantize(float, batches, |model, x| {
                model.edited_loss(x);
            })
            .unwrap();
        assert_eq!(parameters(&by_run), parameters(&by_edits));
    });
}

/// Rows of the table are small, logits are not: a quantizer of the rows would clip them.
#[test]
fn logits_of_a_tied_table_are_not_rounded_as_its_rows() {
    on_tracked(|device| {
        let table = EmbeddingConfig::new(12, 8).init(&device);
        let table = with_numbers(table, 3);
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(8))
            .with_outputs(true);
        let model = config.prepare(table.clone()).unwrap();
        let forward = |table: &Embedding, ids: Tensor<2, Int>| {
            let rows = table.forward(ids) * 20.0;
            let logits = rows.matmul(table.weight.val().transpose().unsqueeze());
            logits.reshape([6, 12])
        };
        let ids = Tensor::<2, Int>::from_ints([[0, 5, 11], [3, 3, 7]], &device);
        let float = values(forward(&table, ids.clone()));
        let found = QuantizedForward::new().run(&model, ids, forward).unwrap();
        let largest = float.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(largest > 0.0);
        assert_near!(values(found).into_iter(), float, 0.05 * largest);
    });
}

/// What no forward pass comes by can be converted nevertheless.
#[test]
fn the_input_of_a_layer_that_is_not_called_gets_no_quantizer() {
    let device = Device::flex().autodiff();
    let model = [5, 4]
        .map(|inputs| LinearConfig::new(inputs, 3).init(&device))
        .to_vec();
    let x = tensor::<2>(1, [6, 5], &device);
    let forward = |model: &Vec<Linear>, x: Tensor<2>| model[0].forward(x);
    let prepared = QatConfig::new()
        .prepare_for(model.clone(), x.clone(), forward)
        .unwrap();
    let names: Vec<String> = quantizers(&prepared).iter().map(|one| one.name()).collect();
    assert_eq!(names, ["0.weight", "input of `0`", "1.weight"]);
    QuantizedForward::new()
        .run(&prepared, x.clone(), forward)
        .unwrap();
    let (converted, _) = ConvertConfig::new().convert(prepared.valid()).unwrap();
    assert_eq!(quantized_weights(&converted).unwrap().len(), 2);
    let config = QatConfig::new()
        .with_sites_of(&model, x.clone(), forward)
        .unwrap();
    let ptq = PtqConfig::new().with_quantize(config);
    assert!(
        ptq.quantize_for(model.valid(), || [x.clone().inner()], forward)
            .is_ok()
    );
}

/// What is multiplied with a table, as in the head of a language model, is an input as that of a layer.
#[test]
fn the_input_of_a_tied_head_is_quantized_and_indices_are_not() {
    on_tracked(|device| {
        let table = EmbeddingConfig::new(12, 8).init(&device);
        let table = with_numbers(table, 3);
        let forward = |table: &Embedding, ids: Tensor<2, Int>| {
            let rows = table.forward(ids).tanh();
            rows.matmul(table.weight.val().transpose().unsqueeze())
        };
        let rows = |table: &Embedding, ids: Tensor<2, Int>| table.forward(ids);
        let ids = Tensor::<2, Int>::from_ints([[0, 5, 11], [3, 3, 7]], &device);
        let names = |model: &Embedding| -> Vec<String> {
            quantizers(model).iter().map(|one| one.name()).collect()
        };
        let looked_up = QatConfig::new()
            .prepare_for(table.clone(), ids.clone(), rows)
            .unwrap();
        assert_eq!(names(&looked_up), ["weight"]);
        let model = QatConfig::new()
            .prepare_for(table.clone(), ids.clone(), forward)
            .unwrap();
        assert_eq!(names(&model), ["weight", "input of `weight`"]);
        let found = QuantizedForward::new()
            .run(&model, ids.clone(), forward)
            .unwrap();
        let float = forward(&table, ids.clone());
        let largest = float.clone().abs().max().into_scalar::<f32>();
        let off = (found.clone() - float).abs().max().into_scalar::<f32>();
        assert!(off > 0.0 && off < 0.02 * largest, "{off} of {largest}");
        let (converted, _) = ConvertConfig::new().convert(model.valid()).unwrap();
        let run = QuantizedForward::new().run(&converted, ids.inner(), forward);
        assert_eq!(values(run.unwrap()), values(found.inner()));
    });
}

#[test]
fn mixed_precision_freezes_batch_norm_from_its_step_on_also_in_a_model_that_was_loaded() {
    let autocast = Autocast::new(FloatDType::BF16).with_fallback(Fallback::Emulate);
    let frozen_from = |step| {
        let schedule = Schedule::new().with_freeze_batch_norm_at(Some(step));
        QatConfig::new().with_schedule(schedule)
    };
    let statistics = |model: &ConvNet| {
        let mut all = parameters(&model.valid());
        all.retain(|one| one.path.contains("running"));
        all
    };
    on_tracked(|device| {
        let new = || with_numbers(ConvNet::new(&device), 7);
        let loss = |model: &ConvNet, step| {
            let batch = ConvNet::batch(step, &device);
            let loss = autocast.run(model, batch, |model, batch| model.loss(batch));
            loss.unwrap()
        };

        // From the first step on, also where no `prepare` has seen the schedule.
        let model = new();
        let quantizers = frozen_from(0).reparameterizer(&model).unwrap();
        let model = attach(model, quantizers).unwrap();
        let before = statistics(&model);
        loss(&model, 0);
        assert_eq!(statistics(&model), before);
        // Also where nothing is in half, and no activation is quantized.
        let weights = frozen_from(0).with_activation(None);
        let float = attach(new(), weights.reparameterizer(&new()).unwrap()).unwrap();
        let run = |model: &ConvNet| {
            let batch = ConvNet::batch(0, &device);
            Autocast::new(FloatDType::F32).run(model, batch, |model, batch| model.loss(batch))
        };
        run(&float).unwrap();
        assert_eq!(statistics(&float), before);
        // Beside a model that does not train, such as a teacher.
        let pair = (new().valid(), model);
        let batch = ConvNet::batch(0, &device);
        let run = autocast.run(&pair, batch, |(_, model), batch| model.loss(batch));
        run.unwrap();
        assert_eq!(statistics(&pair.1), before);
        let prepared = frozen_from(0).prepare(new()).unwrap();
        assert!(!prepared.first_norm.training.is_enabled());

        // Burn's records say nothing of it.
        let mut model = frozen_from(2).prepare(new()).unwrap();
        let mut optim = SgdConfig::new().init();
        for step in 0..2 {
            let grads = GradientsParams::from_grads(loss(&model, step).backward(), &model);
            model = advance(optim.step(0.05, model, grads));
        }
        let before = statistics(&model);
        let fresh = frozen_from(2).prepare(new()).unwrap();
        let loaded = fresh.try_load_record(model.clone().into_record()).unwrap();
        let [expected, found] = [&model, &loaded].map(|model| values(loss(model, 2)));
        assert_eq!(found, expected);
        assert_eq!(statistics(&loaded), before);
    });
}
