//! Random weights and inputs in the engine, against Burn.

use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::tensor::Device;
use burn_lean::deploy::{Arithmetic, Backend, EngineConfig, Export, FloatStorage};
use proptest::prelude::*;

use crate::cases::{Tally, cases};
use crate::hostile::{Kind, kind};
use crate::network::Net;
use crate::support::values;

fn config() -> impl Strategy<Value = EngineConfig> {
    (0usize..3, 0usize..4, 0usize..3, 0usize..3).prop_map(
        |(arithmetic, backend, weights, threads)| {
            let backends = [
                None,
                Some(Backend::Burn),
                Some(Backend::Rten),
                Some(Backend::Own),
            ];
            EngineConfig::new()
                .with_arithmetic(
                    [Arithmetic::Fastest, Arithmetic::Integer, Arithmetic::Float][arithmetic],
                )
                .with_backend(backends[backend])
                .with_weights([FloatStorage::F32, FloatStorage::F16, FloatStorage::BF16][weights])
                .with_threads(threads)
        },
    )
}

/// Where Burn computes finite numbers of ordinary size, the engine computes them, too.
fn agree(
    found: &[f32],
    expected: &[f32],
    config: &EngineConfig,
    compared: &Tally,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    if expected.iter().all(|x| x.abs() < 1e30) {
        prop_assert!(
            found.iter().all(|x| x.is_finite()),
            "{:?}: {:?} for {:?}",
            config,
            found,
            expected
        );
        let largest = expected.iter().fold(1e-30f32, |most, x| most.max(x.abs()));
        let tolerance = if config.weights == FloatStorage::F32 {
            1e-4
        } else {
            5e-2
        };
        for (found, expected) in found.iter().zip(expected) {
            let off = (found - expected).abs() / largest;
            prop_assert!(off <= tolerance, "{:?}: {} for {}", config, found, expected);
        }
        compared.result();
    }
    Ok(())
}

static ENGINES: Tally = Tally::new();
static CONVOLUTIONS: Tally = Tally::new();

#[test]
fn any_engine_computes_what_burn_computes_or_refuses() {
    engines();
    ENGINES.assert_one_of(20);
}

#[test]
fn any_convolution_runs_in_the_engine_as_in_burn_or_is_refused() {
    convolutions();
    CONVOLUTIONS.assert_one_of(30);
}

proptest! {
    #![proptest_config(cases(60))]

    fn engines(
        config in config(), x in kind(), w in kind(), seed in 0u64..10_000, rows in 1usize..6,
    ) {
        ENGINES.case();
        let device = Device::flex();
        let net = Net::of(w, seed, &device);
        let x = x.tensor::<2>(seed, [rows, 8], &device);
        let expected = values(net.forward(x.clone()));
        let export = Export::record(&net, &x, |net: &Net, x| net.forward(x));
        let Ok(export) = export else { return Ok(()) };
        let Ok(engine) = config.compile(export) else { return Ok(()) };
        if let Ok(found) = engine.run(&x) {
            // Half floats end at 65504.
            if config.weights == FloatStorage::F32 || w == Kind::Ordinary {
                agree(&values(found), &expected, &config, &ENGINES)?;
            }
        }
    }

    fn convolutions(
        config in config(), x in kind(), w in kind(), seed in 0u64..10_000,
        channels in proptest::array::uniform2(1usize..5), kernel in proptest::array::uniform2(1usize..5),
        stride in proptest::array::uniform2(1usize..4), padding in proptest::array::uniform4(0usize..4),
        dilation in proptest::array::uniform2(1usize..3), groups in 1usize..3, size in 4usize..10,
    ) {
        let device = Device::flex();
        let [from, to] = channels.map(|channels| channels * groups);
        prop_assume!((0..2).all(|axis| {
            let reach = dilation[axis] * (kernel[axis] - 1) + 1;
            size + padding[axis] + padding[axis + 2] >= reach
        }));
        CONVOLUTIONS.case();
        let mut conv = Conv2dConfig::new([from, to], kernel)
            .with_stride(stride)
            .with_dilation(dilation)
            .with_groups(groups)
            .with_padding(PaddingConfig2d::Explicit(padding[0], padding[1], padding[2], padding[3]))
            .init(&device);
        conv.weight = conv.weight.map(|old| w.tensor(seed, old.dims(), &device));
        let x = x.tensor::<4>(seed, [2, from, size, size], &device);
        let expected = values(conv.forward(x.clone()));
        let export = Export::record(&conv, &x, |conv: &Conv2d, x| conv.forward(x));
        let Ok(export) = export else { return Ok(()) };
        let Ok(engine) = config.compile(export) else { return Ok(()) };
        if let Ok(found) = engine.run(&x)
            && (config.weights == FloatStorage::F32 || w == Kind::Ordinary) {
                agree(&values::<4>(found), &expected, &config, &CONVOLUTIONS)?;
            }
    }
}
