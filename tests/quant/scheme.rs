//! Schemes: what goes together, how it prints and is stored.

use burn_lean::quant::{
    Granularity, Mapping, NumberFormat, QuantError, Scheme,
    format::{ScaleFormat, ScaleRounding},
};

fn int8() -> Scheme {
    Scheme::symmetric(NumberFormat::int8())
}

#[test]
fn integers_have_2_to_8_bits() {
    for bits in [0, 1, 9, 255] {
        let error = Scheme::symmetric(NumberFormat::int(bits))
            .validate(&[4])
            .unwrap_err();
        let QuantError::InvalidConfig { field, value, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!((*field, value), ("bits", &bits.to_string()));
    }
    for bits in 2..=8 {
        assert_eq!(
            Scheme::affine(NumberFormat::uint(bits)).validate(&[4]),
            Ok(())
        );
    }
}

#[test]
fn choices_that_contradict_each_other_are_refused() {
    assert_matches!(
        Scheme::symmetric(NumberFormat::uint8().narrow()).validate_choices(),
        Err(QuantError::InvalidConfig {
            field: "narrow_range",
            ..
        })
    );
    for scheme in [
        Scheme::affine(NumberFormat::E4M3),
        Scheme::symmetric(NumberFormat::uint8()).with_mapping(Mapping::SymmetricNoClipping),
        Scheme::affine(NumberFormat::int8())
            .with_scale_format(ScaleFormat::PowerOfTwo(ScaleRounding::Up)),
    ] {
        let error = scheme.validate(&[4]).unwrap_err();
        assert_matches!(error, QuantError::UnsupportedScheme { .. });
        assert_says!(error, &scheme.to_string());
    }
}

#[test]
fn shapes_that_cannot_be_grouped_are_refused() {
    let shape = || vec![6, 4];
    let blocks = |extents: &[usize]| Granularity::PerBlock {
        extents: extents.to_vec(),
    };
    for (granularity, error) in [
        (
            Granularity::PerChannel { axis: 2 },
            QuantError::AxisOutOfRange {
                axis: 2,
                shape: shape(),
            },
        ),
        (
            blocks(&[1, 1, 1]),
            QuantError::BlockRank {
                extents: vec![1, 1, 1],
                shape: shape(),
            },
        ),
        (
            blocks(&[0]),
            QuantError::InvalidConfig {
                field: "extents",
                value: "[0]".into(),
                expected: "at least 1 along each axis",
            },
        ),
    ] {
        let scheme = int8().with_granularity(granularity);
        assert_eq!(scheme.validate(&shape()), Err(error.clone()));
        assert_eq!(scheme.group_count(&shape()), Err(error));
    }
}

#[test]
fn an_error_names_its_parameter() {
    let error = int8().validate(&[0]).unwrap_err().at("encoder.fc.weight");
    assert_eq!(
        error.to_string(),
        "parameter `encoder.fc.weight`: a tensor of shape [0] has no elements, so no range: leave \
         it out"
    );
}

#[test]
fn groups_are_counted_for_every_granularity() {
    let shape = [4, 6, 8];
    for (granularity, expected) in [
        (Granularity::PerTensor, [1, 1, 1]),
        (Granularity::PerChannel { axis: 1 }, [1, 6, 1]),
        (Granularity::PerToken, [4, 6, 1]),
        (Granularity::PerBlock { extents: vec![4] }, [4, 6, 2]),
        // The last ones have 2 and 3, and there are no 9.
        (
            Granularity::PerBlock {
                extents: vec![9, 4, 5],
            },
            [1, 2, 2],
        ),
        (
            Granularity::PerBlock {
                extents: vec![2, 3, 8],
            },
            [2, 2, 1],
        ),
    ] {
        let scheme = int8().with_granularity(granularity);
        assert_eq!(scheme.group_shape(&shape).unwrap(), expected);
    }
}

#[test]
fn schemes_are_stored_as_text() {
    for scheme in [
        int8(),
        Scheme::affine(NumberFormat::uint(3)).with_granularity(Granularity::PerToken),
        Scheme::nvfp4(ScaleRounding::Standard),
        Scheme::mxfp4(ScaleRounding::Up),
        Scheme::symmetric(NumberFormat::E5M2).with_granularity(Granularity::PerChannel { axis: 3 }),
    ] {
        let text = serde_json::to_string(&scheme).unwrap();
        assert_eq!(serde_json::from_str::<Scheme>(&text).unwrap(), scheme);
    }
    // The format of the scales may be left out.
    let text = r#"{"format": "E4M3", "mapping": "Symmetric", "granularity": "PerTensor"}"#;
    let scheme: Scheme = serde_json::from_str(text).unwrap();
    assert_eq!(scheme, Scheme::symmetric(NumberFormat::E4M3));
    let misspelt = text.replace('}', r#", "scaleformat": "E4M3"}"#);
    let error = serde_json::from_str::<Scheme>(&misspelt).unwrap_err();
    assert_says!(error, "scaleformat");
}

#[test]
fn schemes_print_what_they_are() {
    for (scheme, text) in [
        (int8(), "INT8, symmetric, per tensor"),
        (
            Scheme::affine(NumberFormat::uint(4)).with_granularity(Granularity::PerToken),
            "UINT4, affine, per token",
        ),
        (
            Scheme::nvfp4(ScaleRounding::Up),
            "E2M1, symmetric, per block [16], E4M3 scales",
        ),
    ] {
        assert_eq!(scheme.to_string(), text);
    }
}
