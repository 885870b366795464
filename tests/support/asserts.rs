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

/// That numbers, one by one, are no farther apart than this.
#[allow(unused_macros)]
macro_rules! assert_near {
    ($some:expr, $others:expr, $within:expr $(,)?) => {
        for (one, other) in $some.zip($others) {
            let near = (one - other).abs() <= $within;
            assert!(near, "{one} and {other}");
        }
    };
}
