//! The attribute macro of burn-lean-quant; use it from there.

mod calls;

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::visit_mut::VisitMut;
use syn::{Item, Path, Token, parse_quote};

use calls::Calls;

/// Lets the layers that are called in an `impl` block, a function or a trait's default methods
/// quantize their activations.
///
/// Every call `layer.forward(..)` becomes `layer.forward_q(..)` where the layer is one that has
/// quantizers (see `ForwardQ`), itself or behind references, and stays as it is for everything else:
/// activations, norms, modules of your own. So do `layer.forward::<2>(x)`, whose generic argument is
/// left to inference, calls in macros that take expressions (`vec![self.a.forward(x)]`), and
/// `Linear::forward(&layer, x)`. Nothing else changes; in a model that is not prepared, nothing
/// changes at all.
///
/// `Linear::forward` as a value, without a call, is an error that says what to write.
///
/// Not seen: calls of a layer behind a `Box` or another smart pointer (write `(*layer).forward(x)`),
/// in macros of another grammar, and layers that are called elsewhere, without the attribute.
/// `ConvertConfig::convert_with` and `QatConfig::prepare_with` find them. Attention, transformer
/// encoders and decoders take the crate's own `MhaInput`, `TransformerEncoderInput` and
/// `TransformerDecoderInput`: import these instead of Burn's.
///
/// A `forward` of your own that takes `&mut self` is called as `(&mut self.module).forward(x)`: such
/// a call is left as it is, and any other borrows the receiver shared, which the compiler then
/// refuses without naming this attribute: what a method takes, a macro does not see.
///
/// Where the crate is only reachable by another path, name it:
/// `#[quantize_calls(crate = burn_lean::quant)]`.
///
/// # Panics
///
/// The calls panic where `ForwardQ::forward_q` does: for a scheme that does not fit the shape of an
/// activation.
#[proc_macro_attribute]
pub fn quantize_calls(
    arguments: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    let expanded = expand(arguments.into(), item.into());
    expanded
        .unwrap_or_else(|error| error.into_compile_error())
        .into()
}

/// The item with its calls changed; with a compile error for each that cannot be.
fn expand(arguments: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let Arguments { path } = syn::parse2(arguments)?;
    let mut item: Item = syn::parse2(item).map_err(|error| {
        let hint = "`#[quantize_calls]` goes before a whole `impl` block, a function or a trait";
        syn::Error::new(error.span(), format!("{hint}: {error}"))
    })?;
    if !matches!(item, Item::Impl(_) | Item::Fn(_) | Item::Trait(_)) {
        return Err(syn::Error::new(
            item.span(),
            "`#[quantize_calls]` changes calls: put it before the `impl` block, the function or the \
             trait that calls the layers",
        ));
    }
    let mut calls = Calls::new(path);
    calls.visit_item_mut(&mut item);
    let errors = calls.errors.iter().map(syn::Error::to_compile_error);
    Ok(quote!(#item #(#errors)*))
}

/// `crate = path`, or nothing.
struct Arguments {
    path: Path,
}

impl Parse for Arguments {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        if input.is_empty() {
            let path = parse_quote!(::burn_lean_quant);
            return Ok(Self { path });
        }
        input.parse::<Token![crate]>()?;
        input.parse::<Token![=]>()?;
        let path = input.call(Path::parse_mod_style)?;
        Ok(Self { path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(item: TokenStream) -> String {
        let expanded = expand(TokenStream::new(), item).unwrap();
        expanded.to_string().replace(' ', "")
    }

    #[test]
    fn an_attribute_on_what_calls_nothing_says_where_it_goes() {
        let refuse = |item| expand(TokenStream::new(), item).unwrap_err().to_string();
        let error = refuse(quote!(
            struct Net {
                fc: Linear,
            }
        ));
        assert!(error.contains("put it before the `impl` block"), "{error}");
        let error = refuse(quote!(self.fc.forward(x)));
        assert!(
            error.contains("goes before a whole `impl` block"),
            "{error}"
        );
    }

    #[test]
    fn a_layers_forward_as_a_value_is_an_error_at_its_place() {
        let code = expanded(quote!(
            fn run(layer: &Linear, x: Option<Tensor<2>>) {
                x.map(burn::nn::Linear::forward);
            }
        ));
        assert!(code.contains("compile_error"), "{code}");
        assert!(code.contains("|x|layer.forward(x)"), "{code}");
        // Of the user's own types nothing is known.
        let code = expanded(quote!(
            fn run(x: Option<Tensor<2>>) {
                x.map(Block::forward);
            }
        ));
        assert!(!code.contains("compile_error"), "{code}");
    }

    #[test]
    fn a_mutable_receiver_is_left_alone() {
        let code = expanded(quote!(
            fn run(&mut self, x: Tensor<2>) {
                (&mut self.own).forward(x)
            }
        ));
        assert!(code.contains("(&mutself.own).forward(x)"), "{code}");
        assert!(!code.contains("&&"), "{code}");
    }
}
