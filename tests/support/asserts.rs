//! Assertions that show what they looked at.

/// That a value is of a pattern: as the macro of the standard library, which Rust 1.95 does not have yet.
#[allow(unused_macros)]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(,)?) => {
        match &$value {
            $pattern => {}
            other => panic!("{other:?} is no `{}`", stringify!($pattern)),
        }
    };
}

/// That an error or a text has all these in it.
#[allow(unused_macros)]
macro_rules! assert_says {
    ($said:expr, $($part:expr),+ $(,)?) => {{
        let said = $said.to_string();
        $(assert!(said.contains($part), "{said}");)+
    }};
}

/// That as many numbers as others are, one by one, no farther apart than this.
#[allow(unused_macros)]
macro_rules! assert_near {
    ($some:expr, $others:expr, $within:expr $(,)?) => {
        match ($some, $others, $within) {
            (some, others, within) => {
                let (some, others): (Vec<_>, Vec<_>) =
                    (some.collect(), others.into_iter().collect());
                assert_eq!(some.len(), others.len());
                for (one, other) in some.into_iter().zip(others) {
                    let near = (one - other).abs() <= within;
                    assert!(near, "{one} and {other}");
                }
            }
        }
    };
}
