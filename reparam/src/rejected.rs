//! An error that gives back the value it refused.

use std::error::Error;
use std::fmt;

/// An operation that takes a model by value failed; the model is inside, untouched.
///
/// Training code moves models through functions. An error that dropped the model would lose
/// hours of training, so every fallible function of this project that consumes one returns it
/// here. `?` converts into the plain error where the model is not needed:
/// implement `From<Rejected<T, E>>` for your error type, or use `Box<dyn Error>`.
pub struct Rejected<T, E>(Box<(T, E)>);

impl<T, E> Rejected<T, E> {
    /// Pairs the refused value with the reason.
    pub fn new(value: T, error: E) -> Self {
        Self(Box::new((value, error)))
    }

    /// Why the value was refused.
    pub fn error(&self) -> &E {
        &self.0.1
    }

    /// The refused value, unchanged.
    pub fn value(&self) -> &T {
        &self.0.0
    }

    /// Takes the value back and drops the reason.
    pub fn into_value(self) -> T {
        self.0.0
    }

    /// Takes the reason and drops the value.
    pub fn into_error(self) -> E {
        self.0.1
    }

    /// The value and the reason.
    pub fn into_parts(self) -> (T, E) {
        *self.0
    }

    /// The same value with another reason: that of a caller with an error of its own.
    ///
    /// ```
    /// use burn_lean_reparam::Rejected;
    ///
    /// let rejected = Rejected::new("model", 404).map_error(|code| format!("error {code}"));
    /// assert_eq!(rejected.into_parts(), ("model", "error 404".to_string()));
    /// ```
    pub fn map_error<F>(self, map: impl FnOnce(E) -> F) -> Rejected<T, F> {
        let (value, error) = self.into_parts();
        Rejected::new(value, map(error))
    }
}

impl<T, E: fmt::Debug> fmt::Debug for Rejected<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Rejected").field(self.error()).finish()
    }
}

impl<T, E: fmt::Display> fmt::Display for Rejected<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl<T, E: Error + 'static> Error for Rejected<T, E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error().source()
    }
}
