#include "random/philox.h"

namespace xsoftmax {
namespace {

constexpr bool same(const PhiloxBlock& a, const PhiloxBlock& b) {
  return a.word[0] == b.word[0] && a.word[1] == b.word[1] && a.word[2] == b.word[2] &&
      a.word[3] == b.word[3];
}

// The known-answer tests that Random123 publishes for philox4x32-10, checked at compile time.
static_assert(same(philox4x32({{0, 0, 0, 0}}, 0, 0),
                   {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}}));
static_assert(same(philox4x32({{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}}, 0xffffffffu,
                              0xffffffffu),
                   {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}}));
static_assert(same(philox4x32({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u,
                              0x299f31d0u),
                   {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}));
// The order of counter and key words in philox().
static_assert(same(philox(0x299f31d0a4093822u, 0x0370734413198a2eu, 0x85a308d3243f6a88u),
                   {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}));

} // namespace
} // namespace xsoftmax
