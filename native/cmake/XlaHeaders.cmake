# OCTAVO_FFI_INCLUDE: XLA's FFI headers inside the jaxlib wheel, found without importing jaxlib.
set(OCTAVO_FFI_INCLUDE "" CACHE PATH "Folder that holds xla/ffi/api, of API 0.1")

if(NOT OCTAVO_FFI_INCLUDE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('jaxlib').submodule_search_locations[0] + '/include')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "The Python of this build, ${Python_EXECUTABLE}, has no jaxlib, whose wheel holds XLA's FFI "
      "headers; install jaxlib==0.6.2 there or set OCTAVO_FFI_INCLUDE to the include folder of an unpacked wheel")
  endif()
  set(OCTAVO_FFI_INCLUDE "${found}")
endif()

set(api "${OCTAVO_FFI_INCLUDE}/xla/ffi/api/c_api.h")
if(NOT EXISTS "${api}")
  message(FATAL_ERROR "XLA's FFI headers are not in ${OCTAVO_FFI_INCLUDE}: there is no xla/ffi/api/c_api.h")
endif()
file(STRINGS "${api}" minor REGEX "^#define XLA_FFI_API_MINOR +[0-9]+")
if(NOT minor MATCHES " 1$")
  message(FATAL_ERROR "${api} says '${minor}', and API 0.1 is needed: a handler built against newer headers makes an "
    "older jaxlib fail to start; install jaxlib==0.6.2 or set OCTAVO_FFI_INCLUDE")
endif()
