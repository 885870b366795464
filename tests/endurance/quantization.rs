//! Random schemes, shapes and numbers.

use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, GptqConfig, Granularity, Learned, Mapping, NumberFormat,
    ObserverConfig, PtqConfig, PtqMode, QatConfig, QuantParams, QuantizedTensor, RangeMethod,
    Rounding, RoundingConfig, Scheme, Unsupported, WeightConfig, WeightGranularity, WeightRange,
    fake_quantize,
    format::{ScaleFormat, ScaleRounding},
    model::Unobserved,
    range::Histogram,
    rounding::AdaRoundConfig,
};
use proptest::prelude::*;

use crate::cases::{Tally, cases};
use crate::hostile::{Kind, kind};
use crate::network::Net;
use crate::support::values;

fn format() -> impl Strategy<Value = NumberFormat> {
    prop_oneof![
        6 => (0u8..=9, any::<bool>(), any::<bool>()).prop_map(|(bits, signed, narrow_range)| {
            NumberFormat::Int { bits, signed, narrow_range }
        }),
        1 => Just(NumberFormat::E4M3),
        1 => Just(NumberFormat::E5M2),
        1 => Just(NumberFormat::E2M1),
    ]
}

fn mapping() -> impl Strategy<Value = Mapping> {
    prop_oneof![
        Just(Mapping::Symmetric),
        Just(Mapping::SymmetricNoClipping),
        Just(Mapping::Affine),
    ]
}

fn granularity() -> impl Strategy<Value = Granularity> {
    prop_oneof![
        Just(Granularity::PerTensor),
        (0usize..4).prop_map(|axis| Granularity::PerChannel { axis }),
        Just(Granularity::PerToken),
        proptest::collection::vec(0usize..5, 0..4)
            .prop_map(|extents| Granularity::PerBlock { extents }),
    ]
}

fn scale_format() -> impl Strategy<Value = ScaleFormat> {
    let rounding = || prop_oneof![Just(ScaleRounding::Up), Just(ScaleRounding::Standard)];
    prop_oneof![
        4 => Just(ScaleFormat::F32),
        1 => rounding().prop_map(ScaleFormat::PowerOfTwo),
        1 => rounding().prop_map(ScaleFormat::E4M3),
    ]
}

fn scheme() -> impl Strategy<Value = Scheme> {
    (format(), mapping(), granularity(), scale_format()).prop_map(
        |(format, mapping, granularity, scale_format)| {
            Scheme::symmetric(format)
                .with_mapping(mapping)
                .with_granularity(granularity)
                .with_scale_format(scale_format)
        },
    )
}

fn observer() -> impl Strategy<Value = ObserverConfig> {
    let method = prop_oneof![
        Just(RangeMethod::Search),
        (-1.0f64..120.0).prop_map(|percent| RangeMethod::Percentile { percent }),
        Just(RangeMethod::Mse),
        Just(RangeMethod::Entropy),
    ];
    prop_oneof![
        Just(ObserverConfig::Memoryless),
        Just(ObserverConfig::MinMax),
        (-0.5f64..1.5)
            .prop_map(|averaging_constant| ObserverConfig::MovingAverage { averaging_constant }),
        (0usize..300, method).prop_map(|(bins, range)| ObserverConfig::Histogram { bins, range }),
    ]
}

static SCHEMES: Tally = Tally::new();
static QUANTIZERS: Tally = Tally::new();
static HISTOGRAMS: Tally = Tally::new();

#[test]
fn any_scheme_gives_numbers_of_its_grid_or_an_error() {
    schemes();
    SCHEMES.assert_one_of(40);
}

#[test]
fn any_quantizer_that_can_be_made_keeps_finite_numbers_finite() {
    made_quantizers();
    QUANTIZERS.assert_one_of(100);
}

#[test]
fn any_histogram_has_a_range_of_numbers() {
    histograms();
    HISTOGRAMS.assert_one_of(40);
}

/// What must hold of a tensor of one rank.
fn check<const D: usize>(
    scheme: &Scheme,
    kind: Kind,
    seed: u64,
    shape: [usize; D],
) -> Result<(), TestCaseError> {
    let device = Device::flex();
    let x = kind.tensor(seed, shape, &device);
    let given = values(x.clone());
    let valid = scheme.validate(&shape);
    let sources: [fn(&Tensor<D>, &Scheme) -> _; 3] = [
        QuantParams::of,
        QuantParams::lsq,
        QuantParams::lsq_plus_weights,
    ];
    for source in sources {
        SCHEMES.case();
        let qparams = match source(&x, scheme) {
            Ok(qparams) => qparams,
            Err(_) => {
                prop_assert!(valid.is_err());
                continue;
            }
        };
        prop_assert!(valid.is_ok());
        let y = values(fake_quantize(x.clone(), &qparams, scheme));
        let scale = values(qparams.scale.clone());
        let is_sound = scale.iter().all(|scale| scale.is_finite() && *scale > 0.0);
        if kind.is_finite() && is_sound {
            let of = || format!("{given:?} to {y:?} by {scale:?}");
            prop_assert!(y.iter().all(|y| y.is_finite()), "{}", of());
        }
        // First learned scales come from squares.
        let squares = given.iter().map(|x| x * x).sum::<f32>();
        prop_assert!(
            is_sound || !(kind.is_finite() && squares.is_finite()),
            "{:?}",
            scale
        );
        let quantized = match QuantizedTensor::quantize(&x, &qparams, scheme) {
            Ok(quantized) => quantized,
            Err(_) => {
                prop_assert!(!(kind.is_finite() && is_sound));
                continue;
            }
        };
        prop_assert_eq!(&values(quantized.dequantize::<D>(&device).unwrap()), &y);
        SCHEMES.result();
        if let Ok(stored) = quantized.to_burn::<D>(&device) {
            prop_assert_eq!(values(stored.clone().dequantize()), y);
            let back = QuantizedTensor::from_burn(stored, scheme).unwrap();
            prop_assert_eq!(back.codes(), quantized.codes());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(400))]

    fn schemes(
        scheme in scheme(), kind in kind(), seed in 0u64..10_000, rank in 1usize..=4,
        d in proptest::array::uniform4(0usize..7),
    ) {
        match rank {
            1 => check(&scheme, kind, seed, [d[0] * d[1]])?,
            2 => check(&scheme, kind, seed, [d[0], d[1]])?,
            3 => check(&scheme, kind, seed, [d[0], d[1], d[2]])?,
            _ => check(&scheme, kind, seed, d)?,
        }
    }

    fn made_quantizers(
        scheme in scheme(), observer in observer(), learned in 0usize..3,
        kinds in proptest::collection::vec(kind(), 1..4), seed in 0u64..10_000,
        d in proptest::array::uniform2(0usize..6),
    ) {
        let training = Device::flex().autodiff();
        let learned = [Learned::None, Learned::Lsq, Learned::LsqPlus][learned];
        let config = FakeQuantizeConfig::new(scheme)
            .with_observer(observer)
            .with_learned(learned);
        for quantizer in [config.init(&training), config.init_for(&d, &training)] {
            QUANTIZERS.case();
            let Ok(quantizer) = quantizer else { continue };
            if config.scheme.validate(&d).is_err() {
                continue;
            }
            let mut all_finite = true;
            for (index, kind) in kinds.iter().enumerate() {
                all_finite &= kind.is_finite();
                let x = kind.tensor(seed + index as u64, d, &training).require_grad();
                let y = quantizer.forward(x.clone());
                let grads = y.clone().sum().backward();
                if all_finite {
                    let y = values(y);
                    prop_assert!(y.iter().all(|y| !y.is_nan()), "{:?}: {:?}", kind, y);
                    let grad = values(x.grad(&grads).unwrap());
                    prop_assert!(grad.iter().all(|y| !y.is_nan()), "{:?}: {:?}", kind, grad);
                }
            }
            if all_finite {
                QUANTIZERS.result();
            }
        }
    }

    fn histograms(
        bins in 1usize..200, kinds in proptest::collection::vec(kind(), 0..4), seed in 0u64..10_000,
        count in 0usize..50, scheme in scheme(), method in 0usize..4,
    ) {
        let method = [
            RangeMethod::Search,
            RangeMethod::percentile(),
            RangeMethod::Mse,
            RangeMethod::Entropy,
        ][method];
        HISTOGRAMS.case();
        let mut histogram = Histogram::new(bins);
        for (index, kind) in kinds.iter().enumerate() {
            let mut values = kind.values(seed + index as u64, count);
            // The others are of magnitudes.
            if method != RangeMethod::Search {
                values.iter_mut().for_each(|x| *x = x.abs());
                values.push(0.0);
            }
            histogram.observe(&values);
        }
        prop_assert!(histogram.counts().iter().all(|count| count.is_finite() && *count >= 0.0));
        if scheme.validate_choices().is_ok() && !histogram.is_empty() {
            let (lowest, highest) = (histogram.min(), histogram.max());
            let (min, max) = histogram.range(method, &scheme, lowest, highest);
            prop_assert!(min.is_finite() && max.is_finite() && min <= max, "{} {}", min, max);
            HISTOGRAMS.result();
        }
    }
}

/// What must hold of post-training quantization; whether it gave a model.
fn quantizes(
    config: &PtqConfig,
    inputs: Kind,
    weights: Kind,
    seed: u64,
) -> Result<bool, TestCaseError> {
    let device = Device::flex();
    let net = Net::of(weights, seed, &device);
    let x = || inputs.tensor::<2>(seed, [12, 8], &device);
    let finite = |y: Tensor<2>| values(y).iter().all(|y| y.is_finite());
    let sound = finite(net.forward(x()));
    let quantized = config.quantize_for(net, || [x()], |net: &Net, x| net.forward(x));
    let Ok((quantized, _)) = quantized else {
        return Ok(false);
    };
    let run = burn_lean::quant::QuantizedForward::new();
    let y = run
        .run(&quantized, x(), |net: &Net, x| net.forward(x))
        .unwrap();
    prop_assert!(!sound || finite(y.clone()), "{:?}", values(y));
    let convert = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    if let Ok((converted, _)) = convert.convert(quantized) {
        let y = run
            .run(&converted, x(), |net: &Net, x| net.forward(x))
            .unwrap();
        prop_assert!(!sound || finite(y.clone()), "converted: {:?}", values(y));
    }
    Ok(true)
}

#[test]
fn an_ordinary_model_is_not_refused() {
    for mode in [PtqMode::WeightOnly, PtqMode::Dynamic, PtqMode::Static] {
        let config = PtqConfig::new().with_mode(mode).with_progress(false);
        let given = quantizes(&config, Kind::Ordinary, Kind::Ordinary, 1);
        assert!(given.unwrap(), "{mode:?}");
    }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn any_quantization_of_a_model_is_an_error_or_a_model_of_numbers(
        weight in (format(), mapping(), observer(), 0..4, 0usize..9), activation in scheme(),
        mode in 0usize..3, rounding in 0..4, correct in any::<bool>(), least in any::<bool>(),
        lax in any::<bool>(), inputs in kind(), weights in kind(), seed in 0u64..10_000,
    ) {
        let (format, mapping, observer, per, block) = weight;
        let granularity = match per {
            0 => WeightGranularity::PerTensor,
            1 => WeightGranularity::PerChannel,
            _ => WeightGranularity::PerBlock { size: block },
        };
        let weight = WeightConfig::new()
            .with_format(format)
            .with_mapping(mapping)
            .with_granularity(granularity)
            .with_observer(observer);
        let quantize = QatConfig::new()
            .with_weight(weight)
            .with_activation(Some(FakeQuantizeConfig::new(activation)));
        let rounding = match rounding {
            0 => Rounding::Nearest,
            1 => Rounding::Gptq(GptqConfig::new()),
            2 => Rounding::Auto,
            _ => Rounding::AdaRound(AdaRoundConfig::new().with_iterations(5)),
        };
        let ptq = PtqConfig::new()
            .with_quantize(quantize)
            .with_mode([PtqMode::WeightOnly, PtqMode::Dynamic, PtqMode::Static][mode])
            .with_weight_range(if least { WeightRange::LeastSquares } else { WeightRange::MinMax })
            .with_rounding(
                RoundingConfig::new().with_rounding(rounding).with_bias_correction(correct),
            )
            .with_unobserved(if lax { Unobserved::LeaveFloat } else { Unobserved::Refuse })
            .with_progress(false);
        quantizes(&ptq, inputs, weights, seed)?;
    }
}
