//! Pruning with training between the stages.

use crate::pruner::{Pairs, config, loss, net, pairs, prune, weights, zeros};
use crate::support::Perceptron;
use burn::module::ParamGroup;
use burn::tensor::Device;
use burn_lean::prune::{GradualConfig, Masks, PruneError, SparsitySchedule, mean_loss, run::Epoch};
use burn_lean::reparam::{Rejected, attached};

#[test]
fn gradual_pruning_trains_between_the_stages_with_the_zeros_held() {
    use burn::optim::{GradientsParams, SgdConfig};

    let device = Device::flex().autodiff();
    let pruner = config(0.8)
        .with_stages(3)
        .with_schedule(SparsitySchedule::Polynomial { base: 0.5 });
    let gradual = GradualConfig::new(pruner.clone(), 2, 40).with_learning_rate(0.1);
    let mut rates = Vec::new();
    let mut optim = SgdConfig::new().init();
    let train = |mut model: Perceptron, epoch: &Epoch| {
        if epoch.restart {
            optim = SgdConfig::new().init();
        }
        rates.push(epoch.learning_rate(0.0));
        for batch in pairs(7, &device) {
            let grads = loss(&model, &batch).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(epoch.learning_rate(0.5), model, grads);
        }
        Ok(model)
    };
    let trained = gradual
        .prune(net(&device), loss, |seed| pairs(seed, &device), train)
        .unwrap();
    assert_eq!(rates.len(), 2 + 2 + 40);
    assert_eq!((rates[0], rates[2], rates[4]), (0.1, 0.1, 0.1));
    // Half way down the cosine: the mean of first and last.
    assert!((rates[1] - 0.5 * (0.1 + 1e-5)).abs() < 1e-12);
    let weights = weights(&trained);
    assert_eq!(zeros(&weights), 33);
    // The masks are folded in, and the model trains on.
    assert!(attached(&trained.model).is_empty());
    assert!(trained.model.first.weight.is_require_grad());

    let bare = prune(&pruner, &device).unwrap();
    let loss = |model: &Perceptron| mean_loss(model, loss, &pairs(7, &Device::flex())).unwrap();
    assert!(loss(&trained.model) < loss(&bare.model));
}

/// Between the stages it would be folded in with the masks, and no longer hold.
#[test]
fn gradual_pruning_refuses_a_model_that_carries_anything_but_masks_on_what_is_pruned() {
    let device = Device::flex().autodiff();
    let net = net(&device);
    let second = ParamGroup::from_paths(vec!["second.weight"]);
    let net = Masks::from_zeros(&net, &second)
        .unwrap()
        .attach(net)
        .unwrap();
    let first = ParamGroup::from_paths(vec!["first.weight"]);
    let gradual = GradualConfig::new(config(0.5).with_group(Some(first)), 1, 1);
    let nothing = |_| -> Vec<Pairs> { unreachable!("refused before any gradient") };
    let rejected = gradual
        .prune(net, loss, nothing, |model, _| Ok(model))
        .unwrap_err();
    let (net, error) = rejected.into_parts();
    let expected = PruneError::NeedsMasks {
        path: "first.weight".into(),
        carrying: "second.weight".into(),
        existing: "mask".into(),
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("Masks::keeping_all"));
    assert_eq!(attached(&net).len(), 1);
}

#[test]
fn gradual_pruning_resumes_and_refuses_bad_rates() {
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let pruner = config(0.8)
        .with_stages(3)
        .with_state(Some(folder.path().into()));
    let gradual = GradualConfig::new(pruner, 1, 1);
    let mut epochs = Vec::new();
    let mut run = |fail: bool| {
        gradual.prune(
            net(&device),
            loss,
            |seed| pairs(seed, &device),
            |model, epoch| {
                epochs.push(epoch.stage);
                match fail && epoch.stage == 1 {
                    true => Err(Rejected::new(
                        model,
                        PruneError::Training { reason: "x".into() },
                    )),
                    false => Ok(model),
                }
            },
        )
    };
    assert!(run(true).is_err());
    assert_eq!(run(false).unwrap().stages.len(), 3);
    assert_eq!(epochs, [0, 1, 1, 2]);

    let rejected = gradual
        .with_learning_rate(0.0)
        .prune(
            net(&device),
            loss,
            |seed| pairs(seed, &device),
            |model, _| Ok(model),
        )
        .unwrap_err();
    assert_matches!(
        rejected.error(),
        PruneError::InvalidConfig {
            field: "learning_rate",
            ..
        }
    );
}
