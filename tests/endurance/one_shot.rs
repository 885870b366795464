//! Random presets of one-shot compression.

use burn::tensor::{Device, Tensor};
use burn_lean::oneshot::{
    Activations, OneShot, Order, Pattern, Preset, Prune, PruneMethod, Quantize, Rounding, Scaling,
    Target, load_compressed,
};
use proptest::prelude::*;

use crate::cases::{Tally, cases};
use crate::hostile::{Kind, kind};
use crate::network::Net;
use crate::support::{parameters, scratch};

fn share() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => 0.0f64..1.0,
        1 => prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(f64::NAN), Just(1.0 - 1e-17)],
    ]
}

fn prune() -> impl Strategy<Value = Prune> {
    let pattern = prop_oneof![
        share().prop_map(Pattern::PerLayer),
        share().prop_map(Pattern::PerOutput),
        (0usize..5, 0usize..7).prop_map(|(n, m)| Pattern::NOfM { n, m }),
    ];
    let method = prop_oneof![
        Just(PruneMethod::Magnitude),
        Just(PruneMethod::Wanda),
        Just(PruneMethod::SparseGpt),
        Just(PruneMethod::BestSubset),
    ];
    (pattern, method).prop_map(|(pattern, method)| Prune::new(pattern, method))
}

fn quantize() -> impl Strategy<Value = Quantize> {
    let rounding = prop_oneof![
        Just(Rounding::Nearest),
        (any::<bool>(), 0usize..4).prop_map(|(activation_order, sweeps)| {
            Rounding::Compensated {
                activation_order,
                sweeps,
            }
        }),
    ];
    let group = prop_oneof![
        Just(None),
        (0usize..14).prop_map(Some),
        Just(Some(usize::MAX))
    ];
    (1u8..10, group, any::<bool>(), any::<bool>(), rounding).prop_map(
        |(bits, group, symmetric, search, rounding)| {
            Quantize::new(bits)
                .with_group(group)
                .with_symmetric(symmetric)
                .with_search_range(search)
                .with_rounding(rounding)
        },
    )
}

fn preset() -> impl Strategy<Value = Preset> {
    let scaling = prop_oneof![
        Just(Scaling::Awq),
        share().prop_map(|alpha| Scaling::SmoothQuant { alpha }),
    ];
    let ridge = prop_oneof![4 => 0f64..0.1, 1 => Just(f64::NAN), 1 => Just(1e300)];
    (
        proptest::option::of(prune()),
        proptest::option::weighted(0.8, quantize()),
        proptest::option::weighted(0.3, scaling),
        proptest::option::weighted(0.2, (1u8..10).prop_map(Activations::new)),
        ridge,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(prune, quantize, scaling, activations, ridge, own, block)| {
                Preset::new()
                    .with_prune(prune)
                    .with_quantize(quantize)
                    .with_scaling(scaling)
                    .with_activations(activations)
                    .with_ridge(ridge)
                    .with_target(if own {
                        Target::OwnInputs
                    } else {
                        Target::Original
                    })
                    .with_order(if block { Order::Block } else { Order::Layer })
            },
        )
}

static PRESETS: Tally = Tally::new();

#[test]
fn any_preset_gives_finite_weights_that_a_file_holds_or_an_error() {
    presets();
    PRESETS.assert_one_of(50);
}

proptest! {
    #![proptest_config(cases(100))]

    fn presets(
        preset in preset(), x in kind(), w in kind(), seed in 0u64..10_000, rows in 0usize..20,
    ) {
        PRESETS.case();
        let device = Device::flex();
        let net = Net::of(w, seed, &device);
        let batches = [x.tensor::<2>(seed, [rows, 8], &device), x.tensor(seed + 1, [9, 8], &device)];
        let done = OneShot::new(preset.clone()).compress(net, batches, |net: &Net, x: Tensor<2>| {
            net.forward(x)
        });
        let Ok(done) = done else { return Ok(()) };
        let found = parameters(&done.model);
        for parameter in &found {
            let finite = parameter.values.iter().all(|value| value.is_finite());
            prop_assert!(finite || !w.is_finite(), "{:?}", parameter);
        }
        let (_folder, file) = scratch("model.safetensors");
        done.save(&file).unwrap();
        let loaded = load_compressed(Net::of(Kind::Zeros, 1, &device), &file).unwrap().model;
        // As numbers: a -0.0 comes back as 0.0 where zeros are left out.
        let same = parameters(&loaded) == found;
        prop_assert!(same || !w.is_finite(), "{:?} {:?}", parameters(&loaded), found);
        PRESETS.result();
    }
}
