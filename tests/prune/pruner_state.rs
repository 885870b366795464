//! Which kept stages answer for which run.

use burn::tensor::Device;
use burn_lean::prune::{
    GradualConfig, JudgedRidge, Method, PruneError, Pruned, PrunerConfig, Ridge, Selection,
};

use crate::pruner::{Net, Pairs, config, pairs, prune, weights};
use crate::support::{numbers, with_numbers};

fn field(result: Result<Pruned<Net>, PruneError>) -> String {
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

/// Numbers like 0.1 + 0.2 take 17 digits, which a reader may round to the number next to it.
#[test]
fn a_config_with_many_digits_is_the_same_after_reading_it() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let mut config = kept(&folder);
    let activation_norms = numbers(3, 40).iter().map(|norm| norm.abs() / 3.0).collect();
    config.solver.method = Method::Wanda { activation_norms };
    let first = prune(&config, &device).unwrap();
    let again = config.prune(Net::new(&device), Net::loss, |_| -> Vec<Pairs> {
        unreachable!("all stages are finished")
    });
    assert_eq!(weights(&again.unwrap()), weights(&first));
}

#[test]
fn a_loss_that_is_no_number_can_be_kept() {
    for loss in [f64::NAN, f64::INFINITY, 0.25] {
        let judged = JudgedRidge {
            ridge: Ridge {
                l2: 0.5,
                first_order: None,
                tempering: None,
            },
            loss,
            objective: loss,
        };
        let json = serde_json::to_string(&judged).unwrap();
        let read: JudgedRidge = serde_json::from_str(&json).unwrap();
        assert_eq!(read.ridge, judged.ridge);
        assert_eq!(read.loss.is_finite(), loss.is_finite());
        assert!(read.loss == loss || read.loss.is_nan());
        assert!(read.objective == loss || read.objective.is_nan());
    }
}

#[test]
fn a_stage_whose_sweep_overflows_is_resumed() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let mut config = kept(&folder).with_ridge(Default::default());
    config.fisher.samples = 8;
    // Finite on the gradients' examples; what judges the ridges overflows.
    let loss = |net: &Net, pairs: &Pairs| match pairs.0.dims()[0] {
        8 if pairs.0.clone().device() == Device::flex() => net.loss(pairs) * f32::INFINITY,
        _ => net.loss(pairs),
    };
    let first = config
        .prune(Net::new(&device), loss, |seed| pairs(seed, &device))
        .unwrap();
    let again = config
        .prune(Net::new(&device), loss, |_| -> Vec<Pairs> {
            unreachable!()
        })
        .unwrap();
    assert_eq!(again.stages.len(), 2);
    assert_eq!(weights(&again), weights(&first));
}

#[test]
fn finished_stages_do_not_answer_for_another_model() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let config = kept(&folder);
    prune(&config, &device).unwrap();
    let other = with_numbers(Net::new(&device), 9);
    let before = Selection::of(&other, None)
        .unwrap()
        .flatten(&other)
        .unwrap();
    let rejected = config
        .prune(other, Net::loss, |_| -> Vec<Pairs> { unreachable!() })
        .unwrap_err();
    let (other, error) = rejected.into_parts();
    assert!(error.to_string().contains("model"), "{error}");
    assert_eq!(field(Err(error)), "model");
    let after = Selection::of(&other, None)
        .unwrap()
        .flatten(&other)
        .unwrap();
    after.into_data().assert_eq(&before.into_data(), true);
}

#[test]
fn finished_stages_do_not_answer_for_another_training() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let run = |gradual: GradualConfig| {
        gradual
            .prune(
                Net::new(&device),
                Net::loss,
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
