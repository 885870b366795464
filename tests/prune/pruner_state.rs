//! Which kept stages answer for which run.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{
    Budget, GradualConfig, GradualPruner, Masks, PruneError, Pruned, PrunerConfig, Ridge,
    RidgeChoice, Selection, StageMethod, run::StageReport, solver::JudgedRidge,
};
use burn_lean::quant::{QatConfig, Site, fake::Range, module::map_quantizers};
use burn_lean::reparam::{Rejected, map_leaf};

use crate::pruner::{Pairs, config, loss, net, pairs, prune, weights};
use crate::seals;
use crate::support::{Perceptron, on_each, tensor, values, with_numbers};

fn field(result: Result<Pruned<Perceptron>, PruneError>) -> String {
    match result {
        Err(PruneError::StagesOfAnotherRun { field, .. }) => field,
        other => panic!("{:?}", other.map(|_| ())),
    }
}

fn kept(folder: &tempfile::TempDir) -> PrunerConfig {
    config(0.8)
        .with_stages(2)
        .with_state(Some(folder.path().into()))
}

/// It would load into no model that a later run can bring.
#[test]
fn a_stage_with_masks_attached_is_not_kept_and_one_with_masks_folded_in_is() {
    on_each(|device| {
        let run = |config: &PrunerConfig, net: Perceptron, fold: bool| {
            let attach = |model: Perceptron, masks: &Masks, _: &StageReport| {
                let masked = match Masks::of(&model).unwrap().is_empty() {
                    true => masks.attach(model),
                    false => masks.replace(model),
                };
                let masked = masked.unwrap();
                Ok(if fold { masked.materialize() } else { masked })
            };
            config.prune_with(net, loss, |seed| pairs(seed, device), attach)
        };
        let folder = tempfile::tempdir().unwrap();
        let rejected = run(&kept(&folder), net(device), false).unwrap_err();
        let (masked, error) = rejected.into_parts();
        let expected = PruneError::StageReparameterized {
            path: "first.weight".into(),
            then: None,
            now: Some("mask".into()),
        };
        assert_eq!(error, expected);
        assert!(error.to_string().contains("`mask` now, and nothing then"));
        // It comes back as the stage left it, and nothing of it is in the folder.
        assert!(Masks::of(&masked).unwrap().sparsity() > 0.0);
        let folded = run(&kept(&folder), net(device), true).unwrap();
        let again = run(&kept(&folder), net(device), true).unwrap();
        assert_eq!(weights(&again), weights(&folded));

        // Without a folder masks may stay; with one, where the run begins with them.
        let stages = kept(&folder).with_state(None);
        let bare = run(&stages, net(device), false).unwrap();
        assert_eq!(Masks::of(&bare.model).unwrap(), bare.masks);
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<usize> = (0..40).collect();
        let begin = || {
            let net = net(device);
            let layout = Selection::of(&net, None).unwrap().layout().clone();
            let masks = Masks::from_support(&layout, &all).unwrap();
            masks.attach(net).unwrap()
        };
        let masked = run(&kept(&folder), begin(), false).unwrap();
        let nothing = |_| -> Vec<Pairs> { unreachable!("all stages are finished") };
        let again = kept(&folder).prune(begin(), loss, nothing).unwrap();
        assert_eq!(weights(&again), weights(&masked));
        assert_eq!(Masks::of(&again.model).unwrap(), masked.masks);
    });
}

/// Masks of many weights are lists of many numbers: no line for each of them.
#[test]
fn a_stage_is_kept_without_blanks_between_its_numbers() {
    let folder = tempfile::tempdir().unwrap();
    prune(&kept(&folder), &Device::flex()).unwrap();
    let stage = std::fs::read_to_string(folder.path().join("stage-1/stage.json")).unwrap();
    assert!(
        stage.contains("\"masks\":[{\"path\":\"first.weight\""),
        "{stage}"
    );
    assert!(!stage.contains('\n'));
}

/// Numbers like 0.1 + 0.2 take 17 digits, which a reader may round to the number next to it.
#[test]
fn a_config_with_many_digits_is_the_same_after_reading_it() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let mut config = kept(&folder);
    config.ridge = RidgeChoice::Fixed(0.1 + 0.2);
    let first = prune(&config, &device).unwrap();
    let again = config.prune(net(&device), loss, |_| -> Vec<Pairs> {
        unreachable!("all stages are finished")
    });
    assert_eq!(weights(&again.unwrap()), weights(&first));
}

#[test]
fn a_loss_that_is_no_number_can_be_kept() {
    for loss in [f64::NAN, f64::INFINITY, 0.25] {
        let judged = JudgedRidge {
            ridge: Ridge {
                value: 0.5,
                first_order: None,
                tempering: None,
            },
            loss,
            objective: loss,
        };
        let json = serde_json::to_string(&judged).unwrap();
        let read: JudgedRidge = serde_json::from_str(&json).unwrap();
        assert_eq!(read.ridge, judged.ridge);
        for found in [read.loss, read.objective] {
            assert!(found == loss || found.is_nan() && loss.is_nan(), "{json}");
        }
    }
    // As stages were kept before.
    let kept = r#"{"ridge":{"value":0.5,"first_order":null,"tempering":null},"loss":null,"objective":1.0}"#;
    let read: JudgedRidge = serde_json::from_str(kept).unwrap();
    assert!(read.loss.is_nan() && read.objective == 1.0);
}

#[test]
fn a_stage_whose_sweep_overflows_is_resumed() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let mut config = kept(&folder).with_ridge(Default::default());
    config.fisher.samples = 8;
    // Finite on the gradients' examples; what judges the ridges overflows.
    let loss = |net: &Perceptron, pairs: &Pairs| match pairs.0.dims()[0] {
        8 if pairs.0.clone().device() == Device::flex() => loss(net, pairs) * f32::INFINITY,
        _ => loss(net, pairs),
    };
    let first = config
        .prune(net(&device), loss, |seed| pairs(seed, &device))
        .unwrap();
    let again = config
        .prune(net(&device), loss, |_| -> Vec<Pairs> { unreachable!() })
        .unwrap();
    assert_eq!(again.stages.len(), 2);
    assert_eq!(weights(&again), weights(&first));
}

/// A link that leads nowhere stands for a disk that takes nothing: after a stage its training would be lost.
#[cfg(unix)]
#[test]
fn a_folder_that_takes_no_files_is_refused_before_the_first_stage() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    std::os::unix::fs::symlink(folder.path().join("gone/state"), &state).unwrap();

    let config = config(0.8).with_state(Some(state.clone()));
    let nothing = |_| -> Vec<Pairs> { unreachable!("no gradient is computed") };
    let rejected = config.prune(net(&device), loss, nothing).unwrap_err();
    assert_matches!(rejected.error(), PruneError::Io { .. });
    assert_eq!(rejected.value().weights(), net(&device).weights());

    let mut gradual = GradualPruner::new(Budget::Sparsity(0.8), 2, 1, 1);
    gradual.state = Some(state);
    let nothing = |_| -> Vec<Tensor<2>> { unreachable!("nothing is pruned") };
    let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
    let rejected = gradual.prune(net(&device), forward, nothing, |net, _| Ok(net));
    assert_matches!(rejected.unwrap_err().error(), PruneError::Io { .. });
}

#[test]
fn finished_stages_do_not_answer_for_another_model() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = kept(&folder);
    prune(&config, &device).unwrap();
    let other = with_numbers(net(&device), 9);
    let before = Selection::of(&other, None)
        .unwrap()
        .flatten(&other)
        .unwrap();
    let rejected = config
        .prune(other, loss, |_| -> Vec<Pairs> { unreachable!() })
        .unwrap_err();
    let (other, error) = rejected.into_parts();
    assert_says!(error, "model");
    assert_eq!(field(Err(error)), "model");
    let after = Selection::of(&other, None)
        .unwrap()
        .flatten(&other)
        .unwrap();
    after.into_data().assert_eq(&before.into_data(), true);
}

/// It would get the bias of the kept one.
#[test]
fn finished_stages_do_not_answer_for_a_model_with_another_bias() {
    on_each(|device| {
        let other = |device: &Device| {
            let mut other = net(device);
            let bias = other.second.bias.take();
            other.second.bias = bias.map(|bias| map_leaf(bias, |bias| bias + 1.0));
            other
        };
        let folder = tempfile::tempdir().unwrap();
        let config = kept(&folder);
        prune(&config, device).unwrap();
        let nothing = |_| -> Vec<Pairs> { unreachable!("no gradient is computed") };
        let refused = config.prune(other(device), loss, nothing);
        assert_eq!(field(refused.map_err(PruneError::from)), "rest");

        let folder = tempfile::tempdir().unwrap();
        let mut gradual = GradualPruner::new(Budget::Sparsity(0.8), 2, 0, 0);
        gradual.method = StageMethod::Magnitude;
        gradual.state = Some(folder.path().into());
        let prune = |model: Perceptron| {
            let forward = |net: &Perceptron, x: Tensor<2>| net.forward(x);
            let loader = |seed| [tensor::<2>(seed, [64, 6], device)];
            gradual.prune(model, forward, loader, |net, _| Ok(net))
        };
        let tracked = device.clone().autodiff();
        prune(net(&tracked)).unwrap();
        prune(net(&tracked)).unwrap();
        let refused = prune(other(&tracked)).map(|_| unreachable!("it has another bias"));
        assert_eq!(field(refused.map_err(PruneError::from)), "rest");
    });
}

/// That a value came by a quantizer does not make it another one.
#[test]
fn finished_stages_do_not_answer_for_other_ranges_of_quantizers() {
    let device = Device::flex();
    let calibrated = |max: f32| {
        let prepared = QatConfig::new().prepare(net(&device)).unwrap();
        map_quantizers(prepared, |located| match located.site {
            Site::Weight => located.quantizer,
            _ => {
                let [min, max] = [-max, max].map(|bound| Tensor::from_floats([bound], &device));
                located.quantizer.with_range(Range { min, max })
            }
        })
    };
    let folder = tempfile::tempdir().unwrap();
    let config = kept(&folder);
    let model = calibrated(1.0);
    let loader = |seed| pairs(seed, &device);
    config.prune(model.clone(), loss, loader).unwrap();
    let _ = model.forward_q(tensor::<2>(3, [4, 6], &device));
    let nothing = |_| -> Vec<Pairs> { unreachable!("no gradient is computed") };
    let again = config.prune(model, loss, nothing).unwrap();
    assert_eq!(again.stages.len(), 2);
    let refused = config.prune(calibrated(2.0), loss, nothing);
    assert_eq!(field(refused.map_err(PruneError::from)), "rest");
}

/// An earlier release did not look at all of the model.
#[test]
fn stages_of_another_version_say_what_to_do() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = kept(&folder);
    prune(&config, &device).unwrap();
    let stage = folder.path().join("stage-1");
    let path = stage.join("stage.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let earlier = text.replacen("\"version\":5", "\"version\":4", 1);
    assert_ne!(earlier, text);
    std::fs::write(path, &earlier).unwrap();
    let model = std::fs::read(stage.join("model.bpk")).unwrap();
    let [model, earlier] = [model.as_slice(), earlier.as_bytes()].map(seals::crc32);
    let checksums = format!("{{\"model\":{model},\"stage\":{earlier}}}");
    std::fs::write(stage.join("checksums.json"), checksums).unwrap();

    let error = prune(&config, &device).map(|_| ()).unwrap_err();
    assert_matches!(error, PruneError::Record { .. });
    let advice = format!("remove the folder {} to run", folder.path().display());
    assert_says!(error, "version 4, not 5", &advice);
    std::fs::remove_dir_all(folder.path()).unwrap();
    prune(&config, &device).unwrap();
}

#[test]
fn finished_stages_do_not_answer_for_another_training() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let run = |gradual: GradualConfig| {
        gradual
            .prune(
                net(&device),
                loss,
                |seed| pairs(seed, &device),
                |model, _| Ok(model),
            )
            .map_err(PruneError::from)
    };
    let gradual = GradualConfig::new(kept(&folder), 1, 2);
    run(gradual.clone()).unwrap();
    assert_eq!(run(gradual.clone()).unwrap().stages.len(), 2);
    let more = GradualConfig::new(kept(&folder), 3, 2);
    assert_eq!(field(run(more)), "epochs");
    assert_eq!(field(run(gradual.with_learning_rate(0.2))), "learning_rate");
    // Without training it is another run, too.
    assert_eq!(field(prune(&kept(&folder), &device)), "epochs");
}

/// Its record is transposed: Burn compares the shape with that of the weight, once it was used.
#[test]
fn a_layer_in_column_layout_goes_on_from_its_stage() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = kept(&folder);
    let column = || -> Linear {
        let column = LinearConfig::new(16, 8).with_layout(LinearLayout::Col);
        with_numbers(column.init(&device), 1)
    };
    let loss = |layer: &Linear, (x, y): &Pairs| -> Tensor<1> {
        (layer.forward(x.clone()) - y.clone()).square().mean()
    };
    let loader = |seed: u64| -> Vec<Pairs> {
        let x = tensor::<2>(seed, [16, 16], &device);
        vec![(x, tensor::<2>(seed + 1, [16, 8], &device))]
    };
    let interrupted = config.prune_with(column(), loss, loader, |layer, _, report| {
        match report.stage {
            0 => Ok(layer),
            _ => Err(Rejected::new(layer, PruneError::NoMasks)),
        }
    });
    assert_eq!(interrupted.unwrap_err().into_error(), PruneError::NoMasks);

    let pruned = config.prune(column(), loss, loader).unwrap();
    let weight = values(pruned.model.weight.val());
    let nonzeros = weight.iter().filter(|weight| **weight != 0.0).count();
    // ⌊0.2 · 128⌋ are kept.
    assert_eq!((pruned.stages.len(), nonzeros), (2, 25));
    assert_eq!(pruned.model.weight.dims(), [16, 8]);

    let nothing = |_| -> Vec<Pairs> { unreachable!("all stages are finished") };
    let again = config.prune(column(), loss, nothing).unwrap();
    assert_eq!(again.stages.len(), 2);
    assert_eq!(values(again.model.weight.val()), weight);
}
